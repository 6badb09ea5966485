"""The router watches the pods of a release and tags them."""

from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from corolla.v1 import router_pb2 as pb
from corolla.v1 import router_pb2_grpc
from tests.cluster import release
from tests.cluster.asking import disturbed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROUTER_PORT: Final = 50050
BACK: Final = f"deployment/{release.RELEASE}-block-server-back"
# The first Kubernetes that asks for it when a pool shrinks.
KNOWS_DELETION_COST: Final = 22


def span(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"].get("corolla.dev/span", ""))


def cost(pod: dict[str, Any]) -> int:
    return int(pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost", -1))


def usefulness(pool: str) -> list[int]:
    """The costs of a pool's pods, without the digit for their sessions."""
    return [cost(pod) // 10 * 10 for pod in release.pods("block-server", pool=pool)]


def wait_for_costs(front: list[int], back: list[int]) -> None:
    release.wait_for(
        lambda: (usefulness("front"), usefulness("back")) == (front, back),
        60,
        f"pods of front cost {usefulness('front')} and those of back {usefulness('back')}",
    )


def state_of(router: str, identities: Path, pod_uid: str) -> int:
    """The state of the block server in a pod; 0 when it is not registered."""
    with release.router_channel(router, identities / "operator") as channel:
        placement = router_pb2_grpc.RouterServiceStub(channel).GetPlacement(pb.GetPlacementRequest(), timeout=10)
    return next((int(each.state) for each in placement.servers if each.server.pod_uid == pod_uid), 0)


def test_every_router_watches_and_nothing_is_forbidden(whole: None) -> None:
    for name in release.names(release.pods("router")):
        assert release.metric(name, "corolla_pod_watch_up") == 1
        text = release.kubectl("logs", name)
        assert "kubernetes:" not in text


def test_the_router_listens_only_to_who_shows_a_certificate_of_a_fitting_role(whole: None, identities: Path) -> None:
    def placement_by(channel: grpc.Channel) -> grpc.StatusCode:
        call: Any = router_pb2_grpc.RouterServiceStub(channel).GetPlacement.future(pb.GetPlacementRequest(), timeout=10)
        code: grpc.StatusCode = call.code()
        return code

    with release.forwarded(f"service/{release.RELEASE}-router", ROUTER_PORT) as router:
        found = []
        for identity in ("operator", "router"):
            with release.router_channel(router, identities / identity) as channel:
                found.append(placement_by(channel))
        with grpc.insecure_channel(router) as channel:
            found.append(placement_by(channel))
    assert found == [grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE]


def test_pods_show_their_spans(whole: None) -> None:
    for pool, shown in {"front": "0-15", "back": "15-30"}.items():
        release.wait_for(
            lambda pool=pool, shown=shown: [*map(span, release.pods("block-server", pool=pool))] == [shown] * 2,  # type: ignore[misc]
            60,
            f"pods of {pool} do not show {shown}",
        )
    assert "15-30" in release.kubectl("get", "pods", "--label-columns", "corolla.dev/span")


def test_the_less_a_pod_is_needed_the_less_it_costs_and_the_cheapest_goes(whole: None) -> None:
    wait_for_costs([500, 500], [500, 500])
    release.kubectl("scale", BACK, "--replicas=3")
    release.kubectl("rollout", "status", BACK, "--timeout=5m")
    wait_for_costs([500, 500], [330, 330, 330])
    before = {pod["metadata"]["name"]: cost(pod) for pod in release.pods("block-server", pool="back")}
    release.kubectl("scale", BACK, "--replicas=2")
    release.wait_for(lambda: len(release.pods("block-server", pool="back")) == 2, 60, "the pool does not shrink")
    (gone,) = before.keys() - set(release.names(release.pods("block-server", pool="back")))
    if release.minor_version() >= KNOWS_DELETION_COST:
        assert before[gone] == min(before.values())
    wait_for_costs([500, 500], [500, 500])


def test_a_deleted_pod_leaves_the_chains_at_once_and_its_handover_gives_an_event(
    whole: None, address: str, identities: Path
) -> None:
    deleted: list[str] = []

    def delete() -> None:
        name = release.serving_pod("back")
        (uid,) = [each["metadata"]["uid"] for each in release.pods("block-server") if each["metadata"]["name"] == name]
        deleted.append(name)
        with release.forwarded(f"service/{release.RELEASE}-router", ROUTER_PORT) as router:
            assert state_of(router, identities, uid) == pb.SERVER_STATE_READY
            release.kubectl("delete", "pod", name, "--wait=false")
            leaving = (pb.SERVER_STATE_DRAINING, 0)
            release.wait_for(lambda: state_of(router, identities, uid) in leaving, 15, "chains still name it")

    disturbed(address, delete)
    release.wait_for(
        lambda: deleted[0] in [each["involvedObject"]["name"] for each in release.events("SessionsHandedOver")],
        60,
        "no Event tells what became of the sessions",
    )


def test_an_uncovered_and_restored_span_gives_one_event_each_on_a_router(whole: None) -> None:
    before = {reason: len(release.events(reason)) for reason in ("SpanUncovered", "SpanRestored")}
    release.kubectl("scale", BACK, "--replicas=0")
    release.wait_for(lambda: len(release.events("SpanUncovered")) > before["SpanUncovered"], 60, "no SpanUncovered")
    release.kubectl("scale", BACK, "--replicas=2")
    release.wait_until_whole()
    release.wait_for(lambda: len(release.events("SpanRestored")) > before["SpanRestored"], 60, "no SpanRestored")
    uncovered = release.events("SpanUncovered")
    assert len(uncovered) == before["SpanUncovered"] + 1
    assert uncovered[-1]["type"] == "Warning"
    assert "15:30" in uncovered[-1]["message"]
    assert uncovered[-1]["involvedObject"]["name"] in release.names(release.pods("router"))
