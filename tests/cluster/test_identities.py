"""Every role, and everybody without one, asks for everything, from a pod: router and block server keep to the table."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from corolla.trust.credentials import AUTHORITY_FILE
from corolla.v1 import router_pb2, router_pb2_grpc
from tests.adversary import identity_matrix
from tests.adversary.identity_matrix import ASKERS, DENIED, Asker, Places
from tests.cluster import release
from tests.cluster.bystanders import IDENTITIES, MARK, Bystander, standing
from tests.cluster.policies import CONTROL, DATA, ISSUER, REDIS, ROUTER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ASKER: Final = Bystander("asker", identities=release.ASKERS)


# Says of each place whether it answers in the clear, and which role its certificate names.
HANDSHAKES: Final = """
import json, socket, ssl, sys
found = []
for place in sys.argv[1:]:
    host, port = place.split(":")
    try:
        with socket.create_connection((host, int(port)), 10) as plain:
            plain.sendall(b"PING\\r\\n")
            answer = plain.recv(64)
            clear = "answered" if answer[:1] in b"+-" and answer else "refused"
    except OSError:
        clear = "refused"
    context = ssl.create_default_context(cadata=AUTHORITY)
    context.check_hostname = False
    with context.wrap_socket(socket.create_connection((host, int(port)), 10)) as secure:
        names = dict(secure.getpeercert()["subjectAltName"])
    found.append([clear, names["URI"].split("/")[3]])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def asker(identities: Path) -> Iterator[Bystander]:
    """A pod that every port of the release is open to: identities alone are in its way."""
    release.wait_until_whole()
    spec = {
        "podSelector": {"matchLabels": release.SELECTOR},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {MARK: ASKER.name}}}]}],
        "policyTypes": ["Ingress"],
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": ASKER.name}, "spec": spec,
    }  # fmt: skip
    release.kubectl("create", "--filename", "-", stdin=json.dumps(policy))
    try:
        with standing(ASKER):
            yield ASKER
    finally:
        release.kubectl("delete", "networkpolicy", ASKER.name)


def from_other_pods(asker: Asker) -> dict[str, str]:
    """What the table says to an asker of what other pods reach. AdminService is on the loopback of its pod."""
    return {row: outcome for row, outcome in asker.expected.items() if not row.startswith("AdminService/")}


def placed_server(identities: Path) -> router_pb2.ServerDescription:
    with (
        release.forwarded(f"service/{release.RELEASE}-router", ROUTER) as router,
        release.router_channel(router, identities / "operator") as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        placement = stub.GetPlacement(router_pb2.GetPlacementRequest(), timeout=10)
    server: router_pb2.ServerDescription = placement.servers[0].server
    return server


def test_methods_and_frames_are_taken_as_the_table_says(
    asker: Bystander, identities: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = placed_server(identities)
    host = server.address.rpartition(":")[0]
    services = {
        "RouterService": f"{release.ROUTER_NAME}:{ROUTER}",
        "BlockService": f"{host}:{CONTROL}",
    }
    places = Places(services, f"{host}:{DATA}", server.fingerprint)
    script = Path(identity_matrix.__file__).read_text(encoding="utf-8")
    found = json.loads(asker.run("python", "-", places.as_json, IDENTITIES, stdin=script))
    expected = {(each.name, row): outcome for each in ASKERS for row, outcome in from_other_pods(each).items()}
    seen = {(name, row): outcome for name, row_outcomes in found.items() for row, outcome in row_outcomes.items()}
    assert {cell: outcome for cell, outcome in seen.items() if outcome != expected[cell]} == {}
    assert seen.keys() == expected.keys()
    counts = Counter(seen.values())
    with capsys.disabled():
        cells = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
        sys.stdout.write(f"\nidentities: all {counts.total()} cells as the table says: {cells}\n")


def test_redis_and_the_issuer_speak_tls_alone(asker: Bystander, identities: Path) -> None:
    places = [f"{release.RELEASE}-redis:{REDIS}", f"{release.RELEASE}-issuer:{ISSUER}"]
    authority = (identities / "operator" / AUTHORITY_FILE).read_text(encoding="ascii")
    script = HANDSHAKES.replace("AUTHORITY", repr(authority))
    assert json.loads(asker.run("python", "-", *places, stdin=script)) == [
        ["refused", "redis"],
        ["refused", "issuer"],
    ]


def test_every_call_that_a_role_may_not_make_is_in_the_audit_log(asker: Bystander) -> None:
    """Runs after the one above, which made them."""
    audited = {(each.get("workload"), each.get("method")) for each in denials()}
    for each in ASKERS:
        if each.role is not None:
            workload = f"spiffe://{release.TRUST_DOMAIN}/{each.role.value}/{identity_matrix.ROGUE}"
            denied = {name for name, outcome in from_other_pods(each).items() if outcome == DENIED and "/" in name}
            assert {(workload, name) for name in denied} <= audited


def denials() -> Iterator[dict[str, Any]]:
    for name in release.names([*release.pods("router"), *release.pods("block-server")]):
        for line in release.kubectl("logs", name).splitlines():
            if DENIED in line and line.startswith("{"):
                yield json.loads(line)
