"""Each value has an effect, each setting can be set, and the schema refuses mistyped values."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from corolla.chassis.settings import PREFIX
from corolla.cli.enrolment import TOKEN_FILE_VARIABLE
from corolla.cli.service_commands import ISSUER_VARIABLE
from tests.charts.rendering import NAMED, Object, Refused, helm, named, of_kind, pod_specs, render
from tests.tiers import quick
from tools.chart import CHART, SET_BY_THE_CHART, SETTINGS, Value, camel_case, read_values

ROOT_VALUE: Final = read_values((CHART / "values.yaml").read_text(encoding="utf-8"))
VALUES: Final = {each.path: each for each in ROOT_VALUE.leaves()}

# What has to be on, or said, for a value to matter.
EVERYTHING: Final[Object] = {
    "model": {"hub": {"existingSecret": "hub"}, "volume": {"existingClaim": "models"}},
    "adapters": {"volume": {"existingClaim": "adapters"}},
    "blockServer": {"pools": {"fixed": {}, "scaled": {"autoscaling": {"enabled": True}}}},
    "client": {"apiKeys": {"existingSecret": "keys"}, "cacheSecret": {"existingSecret": "caches"}},
    "redis": {"auth": {"existingSecret": "redis"}, "persistence": {"enabled": True}},
}
TOKENS: Final[Object] = {
    "mode": "oidc",
    "oidc": {"issuer": "https://login:8443", "audience": "corolla", "caSecret": "ca"},
}
NEEDED: Final[dict[str, Object]] = {
    "auth": {"auth": TOKENS},
    "auth.oidc.jwksKey": {"auth": {"oidc": {"jwksSecret": "login"}}},
    "blockServer.defaults.gpu": {"blockServer": {"defaults": {"gpu": {"count": 1}}}},
    "blockServer.defaults.gpu.deviceSelectors": {"blockServer": {"defaults": {"gpu": {"deviceClass": "gpus"}}}},
    "client.service.type": {"client": {"apiKeys": {"existingSecret": "callers"}}},
    "client.autoscaling": {"client": {"autoscaling": {"enabled": True}}},
    "redis.enabled": {"redis": {"external": {"existingSecret": "address"}}},
    "tls": {"tls": {"certManager": {"issuer": "authority"}}},
    # Where nothing else keeps others out, the policies have to.
    "networkPolicy.enabled": {"client": {"tls": {"existingSecret": "public"}}},
    "tracing": {"tracing": {"endpoint": "http://collector:4317", "headers": {"existingSecret": "collector"}}},
    "redis.external": {"redis": {"enabled": False, "external": {"existingSecret": "address"}}},
}
OTHERS: Final[dict[str, Any]] = {
    "auth.mode": "keys", "auth.oidc.issuer": "https://other", "auth.oidc.jwks": "https://other:4443/keys",
    "affinity": {"podAntiAffinity": {"x": []}}, "blockServer.defaults.gpu.count": 0, "blocks": "0:8",
    "image.digest.client": f"sha256:{'ab' * 32}", "image.digest.server": f"sha256:{'ab' * 32}",
    "callers": [{"podSelector": {}}], "extraEgress": [{"ports": [{"port": 8080}]}],
    "deviceSelectors": [{"cel": {"expression": "true"}}], "envFrom": [{"secretRef": {"name": "x"}}],
    "extraContainers": [{"name": "x", "image": "x"}], "extraEnv": [{"name": "X", "value": "1"}],
    "extraInitContainers": [{"name": "x", "image": "x"}], "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    "extraVolumes": [{"name": "x", "emptyDir": {}}], "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["x"]}],
    "imagePullSecrets": ["registry"], "maxUnavailable": 2, "model.dtype": "bfloat16", "model.kvCacheDtype": "fp8",
    "model.quantization": "int8", "pools": {"other": {}}, "pullPolicy": "Never", "pullSecrets": ["registry"],
    "resources": {"limits": {"memory": "99Gi"}}, "podSecurityContext": {"runAsUser": 7},
    "securityContext": {"readOnlyRootFilesystem": False}, "strategy": {"type": "Recreate"},
    "scrapers": [{"podSelector": {}}], "settings": {"graceS": 77}, "monitoring.prometheusRule.interTokenSeconds": "0.2",
    "monitoring.prometheusRule.timeToFirstTokenSeconds": "1.0", "client.service.type": "LoadBalancer",
    "tracing.endpoint": "https://other", "tracing.sampleRatio": 0.5, "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 7}],
}  # fmt: skip
# They matter in an upgrade or on a newer cluster only, and have tests of their own.
ELSEWHERE: Final = {"blockServer.allowSingleReplicaUpgrade", "router.admissionPolicy"}


def nested(path: str, value: Any) -> Object:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def merged(one: Object, other: Object) -> Object:
    both = dict(one)
    for key, value in other.items():
        mine = both.get(key)
        both[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return both


def another(value: Value, present: Object) -> Any:
    """Some other value than the present one."""
    for key in (value.path, value.name):
        if key in OTHERS:
            return OTHERS[key]
    if isinstance(value.default, int):
        current: Any = present
        for key in value.path.split("."):
            current = current[key]
        return not current if isinstance(value.default, bool) else current + 1
    if isinstance(value.default, dict):
        return {"some": "other"}
    return "other"


def without_checksums(objects: list[Object]) -> str:
    return re.sub(r'"checksum/settings": "\w+"', "", json.dumps(objects, sort_keys=True))


PATHS = sorted(set(VALUES) - ELSEWHERE)


def needed(path: str) -> Object:
    base = EVERYTHING
    for beginning, values in NEEDED.items():
        if path.startswith(beginning):
            base = merged(base, values)
    return base


@functools.cache
def shown(base: str) -> set[str]:
    """The texts and maps that show when all are given at once, each with a mark of its own."""
    marks, values = dict[str, str](), json.loads(base)
    for number, path in enumerate(PATHS):
        value = VALUES[path]
        is_free = isinstance(value.default, str | dict) and not {value.path, value.name} & OTHERS.keys()
        if is_free and json.dumps(needed(path)) == base:
            mark = marks[path] = f"v{number}v"
            values = merged(values, nested(path, mark if isinstance(value.default, str) else {mark: "other"}))
    text = without_checksums(render(values))
    return {path for path, mark in marks.items() if mark in text}


@pytest.mark.parametrize("path", quick(PATHS, *PATHS[::30], kinds=PATHS[::10]))
def test_every_value_changes_the_rendering(path: str) -> None:
    base = needed(path)
    if path in shown(json.dumps(base)):
        return
    changed = merged(base, nested(path, another(VALUES[path], merged(ROOT_VALUE.default, base))))
    assert changed != base
    before, after = render(base), render(changed)
    assert without_checksums(after) != without_checksums(before)
    assert left_behind(before, after) == []


def left_behind(before: list[Object], after: list[Object]) -> list[str]:
    """Deployments whose settings are others while their pods stay as they are: settings are read at the start."""
    (old, new), (old_pods, new_pods) = (
        [{each["metadata"]["name"]: each for each in of_kind(objects, kind)} for objects in (before, after)]
        for kind in ("ConfigMap", "Deployment")
    )
    return [
        name
        for name in old_pods.keys() & new_pods.keys()
        if old[name]["data"] != new[name]["data"]
        and old_pods[name]["spec"]["template"] == new_pods[name]["spec"]["template"]
    ]


def test_every_value_has_a_sentence() -> None:
    assert [path for path, value in VALUES.items() if not value.sentence.endswith((".", "ca.crt"))] == []


MISTYPED: Final[dict[str, Object]] = {
    "at the top": {"modle": {"name": "x"}},
    "in a component": {"client": {"replica": 1}},
    "in a pool": {"blockServer": {"pools": {"main": {"replica": 1}}}},
    "in a block server's settings": {"blockServer": {"defaults": {"settings": {"kvCacheMiB": 1}}}},
    "in a pool's settings": {"blockServer": {"pools": {"main": {"settings": {"port": 1}}}}},
    "a port of the chart": {"blockServer": {"pools": {"main": {"settings": {"controlPort": 1}}}}},
    "in a router's settings": {"router": {"settings": {"leaseMS": 1}}},
    "in a client service's settings": {"client": {"settings": {"lease": 1}}},
    "a setting's bounds": {"router": {"settings": {"leaseMs": 1}}},
    "a setting's type": {"client": {"settings": {"stepTimeoutS": "soon"}}},
    "a setting's choice": {"client": {"settings": {"speculation": "maybe"}}},
    "a span": {"blockServer": {"defaults": {"blocks": "0-15"}}},
    "a volume without a name": {"client": {"extraVolumes": [{"emptyDir": {}}]}},
    "a source of variables": {"blockServer": {"pools": {"main": {"envFrom": [{"secret": {"name": "x"}}]}}}},
    "a strategy": {"router": {"strategy": {"type": "rolling"}}},
    "a strategy of pods with GPUs": {"blockServer": {"defaults": {"strategy": {"type": "Recreate"}}}},
    "a resource": {"router": {"resources": {"limit": {"cpu": 1}}}},
    "a pool's name": {"blockServer": {"pools": {"Main_Pool": {}}}},
}


@pytest.mark.parametrize("values", MISTYPED.values(), ids=MISTYPED)
def test_mistyped_values_are_refused(values: Object) -> None:
    with pytest.raises(Refused, match="values don't meet the specifications of the schema"):
        render(values)


# `corolla` reads them before a service does its settings.
ENROLMENT: Final = {ISSUER_VARIABLE, TOKEN_FILE_VARIABLE}
SAMPLES: Final = {"string": "x", "boolean": True, "integer": 1, "number": 1.5}


def sample(facts: Object) -> Any:
    """A value that a setting's schema admits; large, so that its digits show."""
    if "enum" in facts:
        return facts["enum"][-1]
    if "const" in facts:
        return facts["const"]
    if "anyOf" in facts:
        return sample(facts["anyOf"][0])
    if facts["type"] in ("integer", "number") and "maximum" in facts:
        return facts["maximum"]
    return 123456789 if facts["type"] == "integer" else SAMPLES[facts["type"]]


OBJECTS: Final = {
    "blockServer.defaults": "rel-corolla-block-server-main",
    "router": "rel-corolla-router",
    "issuer": "rel-corolla-issuer",
    "client": "rel-corolla-client",
}


@pytest.mark.parametrize("component", SETTINGS)
def test_every_setting_of_a_service_is_reachable(component: str) -> None:
    described = SETTINGS[component].model_json_schema()["properties"]
    given = {
        camel_case(name): sample(facts) for name, facts in described.items() if name not in SET_BY_THE_CHART[component]
    }
    secrets = {"apiKeys": {"existingSecret": "keys"}, "cacheSecret": {"existingSecret": "caches"}}
    base = {
        "model": {"revision": "v1"},
        "adapters": {"volume": {"existingClaim": "adapters"}},
        "client": secrets,
        "auth": merged({"auth": TOKENS}, nested("auth.oidc.jwks", "https://login/keys"))["auth"],
    }
    objects = render(merged(base, nested(f"{component}.settings", given)))
    container = pod_specs(objects)[OBJECTS[component]]["containers"][0]
    data = named(objects, "ConfigMap", OBJECTS[component])["data"]
    seen = {**data, **{each["name"]: each.get("value") for each in container.get("env", [])}}
    own = {name for name in seen if name.startswith(PREFIX)} - ENROLMENT
    # The chart names the defaults of ports that it does not set.
    defaults = {PREFIX + "PORT", PREFIX + "CONTROL_PORT"} & {PREFIX + name.upper() for name in described}
    assert own | defaults == {PREFIX + name.upper() for name in described}
    for name, facts in described.items():
        if name not in SET_BY_THE_CHART[component]:
            expected = sample(facts)
            shown = seen[PREFIX + name.upper()]
            assert shown == (str(expected).lower() if isinstance(expected, bool) else str(expected)) or float(
                shown
            ) == float(expected)


@pytest.mark.parametrize("component", SETTINGS)
def test_services_read_every_setting_that_the_chart_renders(component: str) -> None:
    objects = render({"model": {"revision": "v1"}})
    data = named(objects, "ConfigMap", OBJECTS[component])["data"]
    names = {name for name in data if name.startswith(PREFIX)} - ENROLMENT
    given = {name.removeprefix(PREFIX).lower(): data[name] for name in names}
    settings = SETTINGS[component](**given)
    read = {name: getattr(settings, name) for name in given}
    plain = {name: str(value).lower() if isinstance(value, bool) else value for name, value in read.items()}
    assert {name: type(value)(given[name]) for name, value in plain.items()} == plain


def test_an_upgrade_that_uncovers_a_span_is_refused_unless_forced() -> None:
    alone: list[Object] = [
        {"only": {"replicas": 1, "blocks": "0:8"}},
        {"only": {"replicas": 1}},
        {"one": {"replicas": 1, "blocks": "0:8"}, "other": {"replicas": 1, "blocks": "0:8"}},
        {"scaled": {"blocks": "0:8", "autoscaling": {"enabled": True, "minReplicas": 1}}},
    ]
    for pools in alone:
        lonely: Object = {"blockServer": {"pools": pools}}
        render(lonely)
        with pytest.raises(Refused, match="an upgrade would leave them uncovered"):
            render(lonely, upgrades=True)
        render(merged(lonely, {"blockServer": {"allowSingleReplicaUpgrade": True}}), upgrades=True)
    render({"blockServer": {"pools": {"large": {"replicas": 1}, "small": {"replicas": 1}}}}, upgrades=True)


def test_a_pool_can_override_values_of_all_pools() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    defaults = {"gpu": {"count": 1}, "tolerations": [toleration], "settings": {"fusedBlocks": True, "graceS": 9}}
    plain = {"gpu": {"count": 0}, "tolerations": [], "replicas": 0, "settings": {"fusedBlocks": False, "graceS": 0}}
    objects = render({"blockServer": {"defaults": defaults, "pools": {"plain": plain}}})
    deployment = named(objects, "Deployment", "rel-corolla-block-server-plain")["spec"]
    assert deployment["replicas"] == 0
    assert "tolerations" not in deployment["template"]["spec"]
    assert "nvidia.com/gpu" not in deployment["template"]["spec"]["containers"][0]["resources"]["limits"]
    data = named(objects, "ConfigMap", "rel-corolla-block-server-plain")["data"]
    asked = {name: data[f"COROLLA_{name}"] for name in ("DEVICE", "FUSED_BLOCKS", "GRACE_S")}
    assert asked == {"DEVICE": "cpu", "FUSED_BLOCKS": "false", "GRACE_S": "0"}


def test_the_notes_name_the_next_commands(tmp_path: Path) -> None:
    # helm shows them only to those who have a cluster, so they are rendered as an object.
    chart = shutil.copytree(CHART, tmp_path / "corolla")
    notes = (chart / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    as_object = (
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\nkind: Notes\ntext: {{{{ include "notes" . | toJson }}}}\n'
    )
    (chart / "templates" / "notes.yaml").write_text(as_object, encoding="utf-8")

    def shown(values: Object) -> str:
        command = [helm(), "template", "rel", str(chart), "--namespace", "ns", "--show-only", "templates/notes.yaml"]
        done = subprocess.run(
            [*command, "--values", "-"], input=json.dumps(NAMED | values), capture_output=True, text=True, check=True
        )
        return str(yaml.safe_load(done.stdout)["text"])

    plain, with_keys = shown({}), shown({"client": {"apiKeys": {"existingSecret": "keys"}}})
    for each in (plain, with_keys):
        assert "kubectl --namespace ns get pods" in each
        assert "helm test rel --namespace ns" in each
        assert "port-forward service/rel-corolla-client 50051:50051" in each
    assert "in a browser at http://127.0.0.1:8080/" in plain
    for without_page in ({"service": {"httpPort": 0}}, {"settings": {"httpPage": False}}):
        assert "8080" not in shown({"client": without_page})
    assert "--api-key" not in plain
    assert "--server 127.0.0.1:50051 --api-key KEY" in with_keys
    assert "do not encrypt" not in plain
    assert "tls.enabled is false" in (in_the_clear := shown({"tls": {"enabled": False}}))
    assert "Only the network policies" in in_the_clear
    assert "does not authenticate callers" in plain
    assert "although they carry keys and tokens" in with_keys
    guarded = shown(
        {
            "tls": {"certManager": {"issuer": "authority"}},
            "client": {"tls": {"existingSecret": "public"}},
            "auth": TOKENS,
        }
    )
    assert "--api-key TOKEN" in guarded
    assert "helm test cannot send a token" in guarded
    assert "not encrypted" not in guarded
    assert "do not encrypt" not in guarded
