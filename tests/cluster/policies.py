"""Which pod reaches which port: what the chart's policies let through, and what really comes through."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from tests.cluster import release
from tests.cluster.bystanders import TESTER, Bystander

PUBLIC: Final = release.CLIENT_PORT
METRICS: Final = release.METRICS_PORT
ROUTER: Final = 50050
DATA: Final = 50052
CONTROL: Final = 50053
ISSUER: Final = 50054
REDIS: Final = 6379

STRANGER: Final = Bystander("stranger")
CALLER: Final = Bystander("caller")
"""The one whom `networkPolicy.callers` names, when it names any."""
SCRAPER: Final = Bystander("scraper")
DISGUISED: Final = Bystander(
    "disguised", {**release.SELECTOR, "app.kubernetes.io/component": "client"}, namespace="default"
)
"""It wears the labels of a client service, in another namespace."""
BYSTANDERS: Final = {each.name: each for each in (STRANGER, CALLER, SCRAPER, DISGUISED, TESTER)}
COMPONENTS: Final = ("client", "block-server", "router", "redis", "issuer")

_CHART: Final = release.RELEASE


class Path(NamedTuple):
    """A way from a pod to a port of another one, open only as long as all of `policies` are there."""

    source: str
    target: str
    port: int
    policies: frozenset[str]

    @property
    def way(self) -> "Way":
        return self.source, self.target, self.port


Way = tuple[str, str, int]


def _path(source: str, target: str, port: int, *policies: str) -> Path:
    return Path(source, target, port, frozenset(f"{_CHART}-{each}" for each in policies))


PATHS: Final = (
    _path("client", "router", ROUTER, "client", "router"),
    _path("client", "block-server", DATA, "client", "block-server"),
    _path("block-server", "router", ROUTER, "block-server", "router"),
    _path("block-server", "block-server", DATA, "block-server"),
    _path("router", "redis", REDIS, "router", "redis"),
    *(_path(each, "issuer", ISSUER, each, "issuer") for each in ("client", "block-server", "router", "redis")),
    _path("stranger", "client", PUBLIC, "client"),
    _path("caller", "client", PUBLIC, "client"),
    _path("disguised", "client", PUBLIC, "client"),
    _path("scraper", "client", PUBLIC, "client"),
    _path("scraper", "client", METRICS, "client"),
    _path("scraper", "block-server", METRICS, "block-server"),
    _path("scraper", "router", METRICS, "router"),
    _path("scraper", "issuer", METRICS, "issuer"),
    _path("tester", "client", PUBLIC, "client", "test"),
    _path("tester", "client", METRICS, "client", "test"),
)
"""All that is open; every other way between the pods is closed."""

POLICIES: Final = (_CHART, *(f"{_CHART}-{each}" for each in (*COMPONENTS, "test")))
OPENED: Final[dict[str, frozenset[Way]]] = {_CHART: frozenset({("issuer", "client", PUBLIC)})}
"""The ways that a missing policy opens, by its name. Only the one for all pods keeps the issuer from calling others."""
CALLERS: Final = frozenset({CALLER.name, TESTER.name})
"""The pods that reach the public port where `callers` names `CALLER`; `helm test` always does."""

PORTS: Final = (
    *((target, METRICS) for target in ("client", "block-server", "router", "issuer")),
    ("client", PUBLIC), ("router", ROUTER), ("redis", REDIS), ("issuer", ISSUER),
    *(("block-server", port) for port in (DATA, CONTROL)),
)  # fmt: skip
"""All that listens."""

# Redis' image has no Python. What a policy drops gets no answer.
_TRY: Final = """
patience=$1; shift
for each in "$@"; do (timeout $patience bash -c "</dev/tcp/${each/://}" 2>/dev/null && echo "$each") & done; wait
"""
_ESTABLISHED: Final = "01"


def expected(without: str = "") -> set[Way]:
    """What is open, with one policy taken away."""
    return {each.way for each in PATHS if without not in each.policies} | OPENED.get(without, frozenset())


def open_ways(patience_s: int) -> set[Way]:
    """What is open: every pod tries every port of every other one, and takes no answer in that time for a no."""
    pods = {component: release.pods(component) for component in COMPONENTS}

    def reached(source: str) -> Iterator[Way]:
        # The last pod of a component is another one than the first.
        targets = {f"{_ip(pods[target][-1])}:{port}": (target, port) for target, port in PORTS}
        command = ("bash", "-c", _TRY, "bash", str(patience_s))
        if source in BYSTANDERS:
            said = BYSTANDERS[source].run(*command, *targets)
        else:
            first = pods[source][0]
            others = [each for each in targets if not each.startswith(f"{_ip(first)}:")]
            said = release.kubectl("exec", first["metadata"]["name"], "--", *command, *others)
        yield from ((source, *targets[each]) for each in said.split())

    sources = (*BYSTANDERS, *COMPONENTS)
    with ThreadPoolExecutor(len(sources)) as threads:
        return {way for part in threads.map(lambda source: [*reached(source)], sources) for way in part}


def standing_ways() -> set[Way]:
    """The connections that the release's pods have with each other."""
    pods = {component: release.pods(component) for component in COMPONENTS}
    components = {_ip(pod): component for component, found in pods.items() for pod in found}
    ways: set[Way] = set()
    for component, found in pods.items():
        for pod in found:
            name = pod["metadata"]["name"]
            table = release.kubectl("exec", name, "--", "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6")
            ports = {port for target, port in PORTS if target == component}
            ways |= {
                (components[ip], component, port)
                for ip, port in _connections(table.splitlines())
                if ip in components and port in ports
            }
    return ways


def _ip(pod: dict[str, Any]) -> str:
    return str(pod["status"]["podIP"])


def _connections(table: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The other end's address and the own port of each, from the kernel's tables; addresses of IPv4 only."""
    for fields in (line.split() for line in table):
        if len(fields) > 3 and fields[3] == _ESTABLISHED:
            port, address = fields[1].rpartition(":")[2], fields[2].partition(":")[0]
            yield ".".join(str(each) for each in reversed(bytes.fromhex(address[-8:]))), int(port, 16)
