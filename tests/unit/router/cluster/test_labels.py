"""The labels and deletion costs of pods, and how often the router writes them."""

from dataclasses import replace

import pytest

from corolla.router.cluster.labels import Patch, TagPlan, Tags, wanted_tags
from corolla.router.cluster.pods import Pod, PodTable
from corolla.v1 import router_pb2 as pb
from tests.unit.router.cluster.described import placed


def costs(*servers: pb.PlacedServer) -> list[int]:
    tags = wanted_tags(servers)
    return [int(tags[each.server.pod_uid].cost or -1) for each in servers]


def test_a_label_is_the_span_without_a_colon() -> None:
    tags = wanted_tags([placed("a", "0:15"), placed("b", "15:30", state=pb.SERVER_STATE_JOINING)])
    assert {uid: each.span for uid, each in tags.items()} == {"uid-a": "0-15", "uid-b": "15-30"}
    assert wanted_tags([placed("a", "0:15", pod_uid="")]) == {}


@pytest.mark.parametrize(
    "servers, expected",
    [
        # The only server of blocks costs more than twins, and the more, the more blocks it has.
        ([placed("a", "0:9"), placed("b", "0:9"), placed("c", "9:20"), placed("d", "20:40")], [500, 500, 1110, 1200]),
        # The scarcest block decides: only the last block of the wide one has no second server.
        ([placed("a", "0:11"), placed("b", "0:10")], [1010, 500]),
        # Among equals sessions decide, and never more than that.
        ([placed("a", "0:10"), placed("b", "0:10", num_sessions=100_000), placed("c", "10:11")], [500, 509, 1010]),
        # Only ready servers of the same weights count.
        (
            [placed("a", "0:10"), placed("b", "0:10", state=pb.SERVER_STATE_JOINING),
             placed("c", "0:10", state=pb.SERVER_STATE_DRAINING), placed("d", "0:10", fingerprint="g")],
            [1100, 0, 0, 1100],
        ),
    ],
)  # fmt: skip
def test_a_server_costs_what_would_be_missed(servers: list[pb.PlacedServer], expected: list[int]) -> None:
    assert costs(*servers) == expected


@pytest.mark.parametrize("num_copies", range(1, 12))
def test_the_more_copies_the_less_a_server_costs(num_copies: int) -> None:
    fewer = costs(*(placed(f"s{number}", "0:4") for number in range(num_copies)))
    more = costs(*(placed(f"s{number}", "0:4") for number in range(num_copies + 1)))
    assert max(more) < min(fewer)


def table_of(*pods: Pod) -> PodTable:
    table = PodTable()
    table.listed(pods)
    return table


def labelled(span: str | None) -> dict[str, object]:
    return {"labels": {"corolla.dev/span": span}}


def costing(cost: str | None) -> dict[str, object]:
    return {"annotations": {COST: cost}}


COST = "controller.kubernetes.io/pod-deletion-cost"
BARE = Pod("u", "pod-u")
TAGS = Tags("0-15", "500")


def test_a_pod_is_patched_once_its_tags_have_settled() -> None:
    plan = TagPlan()
    assert plan.due(table_of(BARE), {"u": TAGS}, 0.0) == []
    (patch,) = plan.due(table_of(BARE), {"u": TAGS}, 1.0)
    assert patch == Patch("u", "pod-u", {"metadata": {**labelled("0-15"), **costing("500")}})
    # The API server has not shown it yet; then it has.
    assert plan.due(table_of(BARE), {"u": TAGS}, 2.0) == []
    done = replace(BARE, span="0-15", cost="500")
    assert plan.due(table_of(done), {"u": TAGS}, 100.0) == []


def test_a_patch_that_did_nothing_is_tried_again_later() -> None:
    plan = TagPlan()
    plan.due(table_of(BARE), {"u": TAGS}, 0.0)
    assert len(plan.due(table_of(BARE), {"u": TAGS}, 1.0)) == 1
    assert len(plan.due(table_of(BARE), {"u": TAGS}, 5.9)) == 0
    assert len(plan.due(table_of(BARE), {"u": TAGS}, 6.0)) == 1


def test_unstable_tags_are_not_written() -> None:
    plan = TagPlan()
    for number in range(100):
        wanted = {"u": Tags("0-15", "500") if number % 2 else Tags("15-30", "1150")}
        assert plan.due(table_of(BARE), wanted, number * 0.5) == []


def test_only_differing_tags_are_patched() -> None:
    plan = TagPlan()
    pods = table_of(replace(BARE, span="0-15", cost="1150"))
    plan.due(pods, {"u": TAGS}, 0.0)
    (patch,) = plan.due(pods, {"u": TAGS}, 1.0)
    assert patch.body == {"metadata": costing("500")}


def test_sessions_that_come_and_go_are_written_once_a_minute() -> None:
    plan = TagPlan()
    num_patches, cost = 0, "500"
    for second in range(600):
        wanted = {"u": Tags("0-15", str(500 + second % 10))}
        for patch in plan.due(table_of(replace(BARE, span="0-15", cost=cost)), wanted, float(second)):
            cost = patch.body["metadata"]["annotations"][COST]
            num_patches += 1
    assert 9 <= num_patches <= 11


def test_a_pod_without_a_server_loses_its_tags_after_a_while() -> None:
    plan = TagPlan()
    pods = table_of(replace(BARE, span="0-15", cost="500"))
    assert plan.due(pods, {}, 0.0) == []
    assert plan.due(pods, {}, 14.0) == []
    (patch,) = plan.due(pods, {}, 15.0)
    assert patch.body == {"metadata": {**labelled(None), **costing(None)}}


def test_pods_that_leave_and_pods_of_others_are_left_alone() -> None:
    plan = TagPlan()
    pods = table_of(replace(BARE, is_leaving=True), Pod("v", "pod-v"))
    for second in range(100):
        assert plan.due(pods, {"u": TAGS, "w": TAGS}, float(second)) == []


@pytest.mark.parametrize("foreign", ["x", "-5", "9" * 400, "\u0663"])
def test_tags_that_others_wrote_are_replaced(foreign: str) -> None:
    plan = TagPlan()
    pods = table_of(replace(BARE, span="0-15", cost=foreign))
    plan.due(pods, {"u": TAGS}, 0.0)
    assert len(plan.due(pods, {"u": TAGS}, 1.0)) == 1
