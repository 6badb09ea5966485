"""One release of the chart on the cluster of the current kubeconfig, by the users' own tools.

Nothing is asked of the cluster but by helm and kubectl, of its pods by `port-forward`, `exec` and `logs`: the tests run
wherever a kubeconfig leads to it, and network policies let them in.
"""

import base64
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from corolla.trust.authority import AUTHORITY_KEY_FILE, Authority
from corolla.trust.credentials import AUTHORITY_FILE, Credentials
from corolla.trust.workload import Role, Workload
from tests.adversary import identity_matrix
from tests.architecture.sources import ROOT

CHART: Final = ROOT / "charts" / "corolla"
VALUES: Final = Path(__file__).parent / "values.yaml"
NAMESPACE: Final = "corolla-test"
TRUST_DOMAIN: Final = "corolla"
RELEASE: Final = "corolla"
CLIENT_PORT: Final = 50051
HTTP_PORT: Final = 8080
METRICS_PORT: Final = 9464
ROUTER_NAME: Final = f"{RELEASE}-router.{NAMESPACE}"
SELECTOR: Final = {"app.kubernetes.io/name": "corolla", "app.kubernetes.io/instance": RELEASE}
"""Labels of every pod of the release."""
ASKERS: Final = "askers"
"""The Secret with what those show who ask for what they may not, and the folder of it."""
READY_WITHIN_S: Final = 180
SERVER_IMAGE: Final = os.environ.get("TEST_SERVER_IMAGE") or "corolla-server:test"
CLIENT_IMAGE: Final = os.environ.get("TEST_CLIENT_IMAGE") or "corolla-client:test"
"""What the nodes have, or can fetch; built with `--target demo`."""
REDIS_IMAGE: Final = os.environ.get("TEST_REDIS_IMAGE", "")
"""Empty: that of the chart."""

_CREATE: Final = ("create", "--filename", "-")


class CommandFailed(Exception):
    """The output of helm or kubectl."""


def run(*command: str, stdin: str | None = None) -> str:
    """Its standard output. Raises CommandFailed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    return run("kubectl", "--namespace", NAMESPACE, *arguments, stdin=stdin)


def helm(*arguments: str) -> str:
    return run("helm", "--namespace", NAMESPACE, *arguments)


def make_namespace() -> None:
    """Makes the namespace anew: a run that was cut off has left one."""
    run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=5m")
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    run("kubectl", *_CREATE, stdin=json.dumps(namespace))


def give_identities(folder: Path) -> None:
    """Signs certificates by the release's own authority: for an operator and a router here, and those of `ASKERS`."""
    stored = json.loads(kubectl("get", "secret", f"{RELEASE}-identities", "--output", "json"))["data"]
    for name in (AUTHORITY_FILE, AUTHORITY_KEY_FILE):
        (folder / name).write_bytes(base64.b64decode(stored[name]))
    authority = Authority.read_from(folder)
    for role in (Role.ROUTER, Role.OPERATOR):
        authority.issue(folder / role.value, Workload(TRUST_DOMAIN, role, RELEASE), [])
    identity_matrix.issue(folder / ASKERS, authority, TRUST_DOMAIN)
    shown = (folder / ASKERS).glob("*/*")
    give_secret(ASKERS, {f"{each.parent.name}.{each.name}": each.read_text() for each in shown})


def give_secret(name: str, data: dict[str, str]) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
    kubectl(*_CREATE, stdin=json.dumps(secret))


def install() -> float:
    """Installs and waits until everything is ready. Returns the seconds that it took."""
    make_namespace()
    started = time.monotonic()
    chosen = [part for name, value in image_values().items() for part in ("--set-string", f"{name}={value}")]
    waiting = ("--wait", "--timeout", "15m")
    helm("upgrade", "--install", RELEASE, str(CHART), "--values", str(VALUES), *chosen, *waiting)
    return time.monotonic() - started


def image_values() -> dict[str, str]:
    """The values of the chart that name the images."""
    (server, _, server_tag), (client, _, client_tag) = (each.rpartition(":") for each in (SERVER_IMAGE, CLIENT_IMAGE))
    if server_tag != client_tag:
        raise ValueError(f"the chart has one tag for both, and these are two: {SERVER_IMAGE}, {CLIENT_IMAGE}")
    redis = {"redis.image": REDIS_IMAGE} if REDIS_IMAGE else {}
    return {"image.server": server, "image.client": client, "image.tag": server_tag, **redis}


def pods(component: str, **labels: str) -> list[dict[str, Any]]:
    """Those that are not on their way out, oldest first."""
    wanted = {**SELECTOR, "app.kubernetes.io/component": component}
    wanted |= {f"corolla.dev/{name}": value for name, value in labels.items()}
    selector = ",".join(f"{name}={value}" for name, value in wanted.items())
    items = json.loads(kubectl("get", "pods", "--selector", selector, "--output", "json"))["items"]
    alive = [each for each in items if "deletionTimestamp" not in each["metadata"]]
    return sorted(alive, key=lambda each: str(each["metadata"]["creationTimestamp"]))


def names(found: list[dict[str, Any]]) -> list[str]:
    return [str(each["metadata"]["name"]) for each in found]


def is_ready(pod: dict[str, Any]) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


def events(reason: str) -> list[dict[str, Any]]:
    """Oldest first."""
    selector = f"reason={reason}"
    found = json.loads(kubectl("get", "events", "--field-selector", selector, "--output", "json"))["items"]
    return sorted(found, key=lambda each: str(each["metadata"]["creationTimestamp"]))


def minor_version() -> int:
    """The minor version of the cluster's Kubernetes: 20 for 1.20."""
    version = json.loads(run("kubectl", "version", "--output", "json"))["serverVersion"]
    return int(re.sub(r"\D", "", version["minor"]))


def wait_until_whole(timeout_s: float = 600) -> None:
    """Until every object of the release has all of its pods again."""
    wanted = {"block-server": 4, "client": 2, "router": 2, "redis": 1, "issuer": 1}
    wait_for(
        lambda: all(sum(map(is_ready, pods(component))) == number for component, number in wanted.items()),
        timeout_s,
        "the release is not whole again",
    )


def wait_for(is_so: Callable[[], bool], timeout_s: float, complaint: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.5)


def metric(pod: str, name: str) -> float:
    """The sum of a metric's series in one pod."""
    with forwarded(f"pod/{pod}", METRICS_PORT) as address:
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=30).read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE))


def serving_pod(pool: str) -> str:
    """The block server of a pool that computes now. Idle conversations may be held by all of them."""
    before = {name: _num_computed_tokens(name) for name in names(pods("block-server", pool=pool))}
    grown: list[str] = []

    def one_has_grown() -> bool:
        grown[:] = [name for name, number in before.items() if _num_computed_tokens(name) > number]
        return bool(grown)

    wait_for(one_has_grown, 30, f"no block server of pool {pool} computes")
    return grown[0]


def _num_computed_tokens(pod: str) -> float:
    return metric(pod, "corolla_hop_tokens_total")


def kill(pod: str) -> None:
    """Ends a pod without notice."""
    kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")


def evict(pod: str) -> None:
    """Evicts a pod, as `kubectl drain` does. Raises CommandFailed where the budget forbids it."""
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
    if "policy/v1\n" in run("kubectl", "api-versions"):
        eviction["apiVersion"] = "policy/v1"
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction"
    kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


@contextmanager
def forwarded(target: str, port: int = CLIENT_PORT) -> Iterator[str]:
    """host:port of this machine that leads to a port of a pod or service of the release."""
    process = subprocess.Popen(
        ["kubectl", "--namespace", NAMESPACE, "port-forward", target, f":{port}"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        match = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert match, f"kubectl port-forward {target} said {said!r}"
        yield f"127.0.0.1:{match[1]}"
    finally:
        process.terminate()
        process.wait()


def router_channel(router: str, identity: Path) -> grpc.Channel:
    """Opens a channel to a forwarded port, where the router's name is another than its address."""
    options = [("grpc.ssl_target_name_override", ROUTER_NAME)]
    return grpc.secure_channel(router, Credentials(identity).for_channels(), options)


def leftovers() -> list[str]:
    """The objects that the release still has in the cluster."""
    kinds = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,pvc"
    selector = f"app.kubernetes.io/instance={RELEASE}"
    return kubectl("get", kinds, "--selector", selector, "--output", "name").split()
