"""Which server stands by for a hop, takes its sessions over, or gives it the beginning of a text."""

from collections import Counter
from typing import Any

import pytest

from corolla.planning.candidates import candidates
from corolla.planning.losses import lacks
from corolla.planning.replicas import in_turn
from corolla.planning.standbys import Lack, holder_for, standby_for, takers_for
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span


def placed(server_id: str, host: str, zone: str = "a", start: int = 0, end: int = 4, **facts: Any) -> pb.PlacedServer:
    described = {"fingerprint": facts.pop("fingerprint", "f"), "node": facts.pop("node", "")}
    server = pb.ServerDescription(server_id=server_id, address=f"{host}:1", zone=zone, **described)
    span = common_pb2.BlockSpan(start=start, end=end)
    state, suspected = facts.pop("state", pb.SERVER_STATE_READY), facts.pop("suspected", False)
    load = pb.ServerLoad(**{"numerics": "n", "max_session_tokens": 1000, **facts})
    return pb.PlacedServer(server=server, span=span, state=state, suspected=suspected, load=load)


HOP = common_pb2.Hop(server_id="hop", address="10.0.0.1:1", span=common_pb2.BlockSpan(start=0, end=2))
HELD = placed("hop", "10.0.0.1")


def chosen(*others: pb.PlacedServer, excluded: tuple[str, ...] = (), **facts: Any) -> str:
    ready = {each.server_id: each for each in candidates([HELD, *others])}
    found = standby_for(HOP, ready, excluded, num_tokens=100, **facts)
    if found is None:
        return ""
    assert found.span == HOP.span
    return found.server_id


def test_another_node_comes_before_another_zone_and_load() -> None:
    here = placed("here", "10.0.0.1", max_session_tokens=9000)
    near = placed("near", "10.0.0.2", max_session_tokens=9000)
    far, roomy = placed("far", "10.0.0.3", "b"), placed("roomy", "10.0.0.4", "b", max_session_tokens=5000)
    assert chosen() == ""
    assert chosen(here) == "here"
    assert chosen(here, near) == "near"
    assert chosen(here, near, far) == "far"
    assert chosen(here, near, far, roomy) == "roomy"
    assert chosen(here, near, far, roomy, num_placed={"roomy": 1}) == "far"
    assert chosen(here, near, far, roomy, excluded=("far", "roomy")) == "near"


def test_pods_with_addresses_of_their_own_may_be_on_one_machine() -> None:
    own = placed("hop", "10.0.0.1", node="m1")
    same, other = placed("a", "10.0.0.2", node="m1"), placed("b", "10.0.0.3", node="m2")
    ready = {each.server_id: each for each in candidates([own, same, other])}
    found = standby_for(HOP, ready, (), num_tokens=100)
    assert found is not None
    assert found.server_id == "b"
    assert lacks([own, same])["hop"] is Lack.NODE
    assert "hop" not in lacks([own, same, other])
    assert lacks([own, placed("c", "10.0.0.1")])["hop"] is Lack.NODE, "one of an older release names no machine"


def test_planners_that_know_nothing_of_each_other_choose_standbys_evenly() -> None:
    servers = candidates([HELD, *(placed(f"s{number}", f"10.0.1.{number}") for number in range(20))])
    chosen_by_all: Counter[str] = Counter()
    for number in range(16):
        ready = {each.server_id: each for each in in_turn(servers, number * 0.618 % 1)}
        num_placed: Counter[str] = Counter()
        for _ in range(10):
            found = standby_for(HOP, ready, (), num_tokens=50, num_placed=num_placed)
            assert found is not None
            num_placed[found.server_id] += 1
        chosen_by_all.update(num_placed)
    assert max(chosen_by_all.values()) <= 1.3 * chosen_by_all.total() / 20


@pytest.mark.parametrize(
    "facts",
    [
        {"numerics": "other"}, {"state": pb.SERVER_STATE_DRAINING}, {"suspected": True}, {"start": 1}, {"end": 1},
        {"fingerprint": "g"},
    ],
    ids=str,
)  # fmt: skip
def test_a_server_that_could_not_go_on_does_not_stand_by(facts: dict[str, Any]) -> None:
    other = placed("other", "10.0.0.2", **facts)
    assert chosen(other) == ""
    assert holder({"other": 64}, other) == ""
    assert taking(other) == (["other"] if "numerics" in facts else [])


def taking(*others: pb.PlacedServer, **facts: Any) -> list[str]:
    """The servers that could take a session of 100 tokens over from `hop`."""
    (own,) = candidates([HELD])
    found = takers_for(candidates([HELD, *others]), own, Span(0, 2), 100, **facts)
    return [each.server_id for each in found]


def test_servers_with_room_take_sessions_over_then_those_that_compute_alike_and_then_other_nodes() -> None:
    alike, other = placed("alike", "10.0.0.2"), placed("other", "10.0.0.2", max_session_tokens=9000, numerics="m")
    here, roomy = (
        placed("here", "10.0.0.1", max_session_tokens=9000),
        placed("roomy", "10.0.0.3", max_session_tokens=2000),
    )
    full, empty = placed("full", "10.0.0.4", max_session_tokens=99), placed("empty", "10.0.0.4", max_session_tokens=0)
    servers = other, full, here, alike, empty, roomy
    with_room = ["roomy", "alike", "here", "other"]
    assert taking(*servers) == with_room
    assert taking(*servers, is_guaranteed=True) == [*with_room, "full", "empty"]


def test_servers_that_may_hold_common_pages_come_last_until_they_do() -> None:
    whole, rest = placed("whole", "10.0.0.2"), placed("rest", "10.0.0.3", max_session_tokens=40)
    less = placed("less", "10.0.0.3", max_session_tokens=39)
    assert taking(whole, rest, less) == ["whole"]
    assert taking(whole, rest, less, num_common=60) == ["whole", "rest"]
    assert taking(whole, rest, less, num_common=60, holders=["rest", "less"]) == ["rest", "whole"]


def holder(held: dict[str, int], *others: pb.PlacedServer, excluded: tuple[str, ...] = ()) -> str:
    ready = {each.server_id: each for each in candidates([HELD, *others])}
    found = holder_for(HOP, ready, excluded, held)
    if found is None:
        return ""
    assert found.span == HOP.span
    return found.server_id


def test_the_server_that_holds_most_of_a_text_gives_it_to_a_hop_that_holds_less() -> None:
    full, other = placed("full", "10.0.0.1", max_session_tokens=1), placed("other", "10.0.0.2", numerics="n+head")
    assert chosen(full) == ""
    assert holder({"full": 128, "other": 64}, full, other) == "full"
    assert holder({"full": 128, "other": 192, "hop": 64}, full, other) == "other"
    assert holder({"full": 128, "other": 192, "hop": 192}, full, other) == ""
    assert holder({"full": 128, "other": 192}, full, other, excluded=("other",)) == "full"
    assert holder({"gone": 192}, full, other) == holder({}, full, other) == ""
