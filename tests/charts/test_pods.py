"""What operators add to pods, Services and Deployments: each kind of pod and each pool takes all of it."""

import json
import re
from typing import Any, Final

import pytest

from tests.architecture.sources import ROOT
from tests.charts.rendering import CI_VALUES, Object, Refused, named, of_kind, pod_specs, render
from tests.charts.test_values import merged, nested
from tests.tiers import quick

# Where the values of each kind of pod stand, and the names of its object and of its container.
KINDS: Final = {
    "blockServer.defaults": ("rel-corolla-block-server-main", "block-server"),
    "blockServer.pools.large": ("rel-corolla-block-server-large", "block-server"),
    "router": ("rel-corolla-router", "router"),
    "issuer": ("rel-corolla-issuer", "issuer"),
    "client": ("rel-corolla-client", "client"),
    "redis": ("rel-corolla-redis", "redis"),
    "test": ("rel-corolla-test-generation", "generation"),
}
every_kind = pytest.mark.parametrize("path", quick(KINDS, "blockServer.pools.large", kinds=["redis", "test"]))
PODS: Final = frozenset(name for name, _ in KINDS.values())

ADDED: Final[Object] = {
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "nodeSelector": {"disk": "local"},
    "priorityClassName": "high",
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "podAnnotations": {"an": "annotation"},
    "podLabels": {"a": "label"},
    "pullSecrets": ["own", {"name": "other"}],
    "hostAliases": [{"ip": "10.0.0.7", "hostnames": ["store"]}],
    "envFrom": [{"prefix": "P_", "configMapRef": {"name": "proxy", "optional": True}}],
    "extraEnv": [{"name": "EXTRA", "value": "1"}],
    "extraVolumes": [{"name": "weights", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "weights", "mountPath": "/weights", "readOnly": True}],
    "extraInitContainers": [{"name": "fetch", "image": "fetch:1"}],
    "extraContainers": [{"name": "logs", "image": "logs:1"}],
}
BASE: Final[Object] = {"blockServer": {"pools": {"main": {}, "large": {}}}}


def specs_with(path: str, values: Object, **options: Any) -> dict[str, Object]:
    return pod_specs(render(merged(BASE, nested(path, values)), **options))


@every_kind
def test_each_kind_of_pod_and_each_pool_takes_what_is_added(path: str) -> None:
    name, main = KINDS[path]
    (container, *own, extra), spec = (found := specs_with(path, ADDED))[name]["containers"], found[name]
    before = pod_specs(render(BASE))[name]
    assert container["name"] == main
    for field in ("affinity", "nodeSelector", "priorityClassName", "tolerations", "hostAliases"):
        assert spec[field] == ADDED[field], field
    assert spec["initContainers"] == ADDED["extraInitContainers"]
    assert [extra] == ADDED["extraContainers"]
    assert spec["imagePullSecrets"] == [{"name": "own"}, {"name": "other"}]
    # What the chart has stays, and comes first, so that what is added takes precedence.
    plain, *own_before = before["containers"]
    assert own == own_before
    for field, given in (("env", "extraEnv"), ("envFrom", "envFrom"), ("volumeMounts", "extraVolumeMounts")):
        assert container[field] == [*plain.get(field, []), *ADDED[given]], field
    assert spec["volumes"] == [*before.get("volumes", []), *ADDED["extraVolumes"]]
    others = {"rel-corolla-block-server-large"} if path == "blockServer.defaults" else set()
    unchanged = PODS - {name} - others
    assert {each: found[each] for each in unchanged} == {each: pod_specs(render(BASE))[each] for each in unchanged}


def test_labels_and_annotations_reach_every_pod_and_never_take_the_place_of_the_charts_own() -> None:
    stolen = {"app.kubernetes.io/name": "x", "app.kubernetes.io/component": "x", "corolla.dev/pool": "x"}
    values = BASE
    for path in KINDS:
        values = merged(values, nested(path, {**ADDED, "podLabels": {"a": "label", **stolen}}))
    plain = {each["metadata"]["name"]: each for each in render(BASE)}
    for each in render(merged(values, {"commonLabels": stolen})):
        is_pod = each["kind"] == "Pod"
        if not is_pod and each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        metadata = each["metadata"] if is_pod else each["spec"]["template"]["metadata"]
        name = each["metadata"]["name"]
        before = plain[name]["metadata"] if is_pod else plain[name]["spec"]["template"]["metadata"]
        expected = {**before["labels"], "a": "label"}
        if "corolla.dev/pool" not in before["labels"]:
            expected["corolla.dev/pool"] = "x"
        assert metadata["labels"] == expected
        assert metadata["annotations"]["an"] == "annotation"
        assert set(before.get("annotations", {})) <= set(metadata["annotations"])


SERVICES: Final = {
    "blockServer.service": "rel-corolla-block-server",
    "router.service": "rel-corolla-router",
    "client.service": "rel-corolla-client",
    "client.headlessService": "rel-corolla-client-pods",
    "issuer.service": "rel-corolla-issuer",
    "redis.service": "rel-corolla-redis",
}
WORKLOADS: Final = {path: name for path, (name, _) in KINDS.items() if path != "test"}


def test_every_service_and_every_workload_takes_annotations_and_labels() -> None:
    objects = render(BASE)
    assert set(SERVICES.values()) == {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    workloads = of_kind(objects, "Deployment", "StatefulSet")
    assert set(WORKLOADS.values()) == {each["metadata"]["name"] for each in workloads}
    given = {"annotations": {"an": "annotation"}, "labels": {"a": "label", "corolla.dev/scrape": "x"}}
    values = BASE
    for path in (*SERVICES, *WORKLOADS):
        values = merged(values, nested(path, given))
    changed = {(each["kind"], each["metadata"]["name"]): each["metadata"] for each in render(values)}
    for each in (*of_kind(objects, "Service"), *workloads):
        metadata, before = changed[each["kind"], each["metadata"]["name"]], each["metadata"]
        assert metadata["annotations"] == {"an": "annotation"}, before["name"]
        # Prometheus finds a Service by this label, and each pod once.
        assert metadata["labels"] == {**given["labels"], **before["labels"]}, before["name"]


@every_kind
def test_security_contexts_are_set_emptied_in_part_and_emptied_as_a_whole(path: str) -> None:
    name, _ = KINDS[path]

    def contexts(values: Object) -> tuple[Any, Any]:
        spec = specs_with(path, values)[name]
        return spec.get("securityContext"), spec["containers"][0].get("securityContext")

    pod, container = contexts({})
    assert pod["runAsUser"] == pod["fsGroup"] == (999 if path == "redis" else 10001)
    own = {"podSecurityContext": {"runAsUser": 7}, "securityContext": {"readOnlyRootFilesystem": False}}
    assert contexts(own) == ({**pod, "runAsUser": 7}, {**container, "readOnlyRootFilesystem": False})
    users = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))
    rest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert contexts({"podSecurityContext": users}) == (rest, container)
    assert contexts({"podSecurityContext": None, "securityContext": None}) == (None, None)
    assert contexts({"securityContext": dict.fromkeys(container)}) == (pod, None)


def test_openshifts_pods_name_no_user_and_run_as_any_with_group_0() -> None:
    (file,) = [each for each in CI_VALUES if "openshift" in each.name]
    objects = render(files=[file])
    for spec in pod_specs(objects).values():
        assert set(spec["securityContext"]) == {"runAsNonRoot", "seccompProfile"}
        for volume in spec["volumes"]:
            # Group 0 reads a Secret of mode 0440 that is root's, as without fsGroup it is.
            assert volume.get("secret", {}).get("defaultMode", 0o444) & 0o440 == 0o440
    # What a process writes is on volumes: in the images nothing belongs to their user, and HOME is where a volume is.
    for image in ("server", "client"):
        text = (ROOT / f"Dockerfile.{image}").read_text(encoding="utf-8")
        assert re.findall(r"^USER (.*)$", text, re.M) == ["10001:0"]
        assert re.findall(r"\bHOME=(\S+)", text) == ["/tmp"]
        assert "chown" not in text


AT_THE_REGISTRY: Final = {
    "team/corolla-server": "mirror:5000/all/team/corolla-server",
    "registry.example.org/team/corolla-server": "mirror:5000/all/team/corolla-server",
    "localhost/corolla-server": "mirror:5000/all/corolla-server",
    "registry:5000/corolla-server": "mirror:5000/all/corolla-server",
}


@pytest.mark.parametrize("image", quick(AT_THE_REGISTRY, "registry.example.org/team/corolla-server"))
def test_one_registry_takes_the_place_of_that_of_every_image(image: str) -> None:
    values = {
        "global": {"imageRegistry": "mirror:5000/all/", "imagePullSecrets": ["mirror"], "others": {"own": 1}},
        "image": {"server": image, "pullSecrets": ["images", "mirror"]},
        "redis": {"pullSecrets": ["redis"]},
    }
    specs = pod_specs(render(values))
    images = {name: spec["containers"][0]["image"] for name, spec in specs.items()}
    assert images["rel-corolla-block-server-main"] == f"{AT_THE_REGISTRY[image]}:0.2.0"
    assert (
        images["rel-corolla-client"] == images["rel-corolla-test-generation"] == "mirror:5000/all/corolla-client:0.2.0"
    )
    assert images["rel-corolla-redis"] == "mirror:5000/all/redis:7.2-bookworm"
    for name, spec in specs.items():
        own = ["redis"] if name == "rel-corolla-redis" else []
        assert [each["name"] for each in spec["imagePullSecrets"]] == ["mirror", "images", *own], name


@pytest.mark.parametrize("component", ["router", "client"])
def test_routers_and_client_services_take_another_strategy(component: str) -> None:
    def strategy(given: Object) -> Any:
        objects = render({component: {"strategy": given}})
        return named(objects, "Deployment", f"rel-corolla-{component}")["spec"]["strategy"]

    assert strategy({}) == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert strategy({"rollingUpdate": {"maxSurge": "50%"}})["rollingUpdate"] == {"maxSurge": "50%", "maxUnavailable": 0}
    # The API refuses what is left of the defaults.
    assert strategy({"type": "Recreate"}) == {"type": "Recreate"}


def test_the_same_values_give_the_same_text() -> None:
    values: Object = {"commonLabels": {"z": "1", "a": "2"}}
    for path in KINDS:
        values = merged(values, nested(path, {**ADDED, "podLabels": {"y": "1", "b": "2"}}))
    first = render(values)
    again = render({**values, "nameOverride": ""})
    assert json.dumps(first) == json.dumps(again)


def test_an_init_container_without_an_image_is_refused() -> None:
    with pytest.raises(Refused, match="image"):
        render({"redis": {"extraInitContainers": [{"name": "x"}]}})
