"""How far standbys may be believed."""

from collections import Counter

from corolla.chain.standby_hops import StandbyHop, StandbyHops
from corolla.v1 import common_pb2


def hop(server_id: str) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=server_id, address=f"{server_id}:1", span=common_pb2.BlockSpan(start=0, end=1))


def test_what_came_after_an_opening_counts_only_once_the_standby_is_named_again() -> None:
    standbys = StandbyHops({"a": StandbyHop(hop("s"), is_named=True)})
    assert list(standbys.trusted_on(common_pb2.Chain(hops=[hop("s")]))) == []
    for position in (90, 70, 80):
        standbys.distrust({b"row": position, b"other": 100 - position})
    standbys.distrust({b"row": 95, b"other": 95, b"new": 5})
    trusted = {b"row": 70, b"other": 10, b"new": 0}
    assert list(standbys.trusted_on(common_pb2.Chain(hops=[hop("s"), hop("b")]))) == [(hop("s"), trusted)]
    assert not standbys.by_hop["a"].is_named
    standbys.by_hop["a"] = StandbyHop(hop("s"), is_named=True)
    assert list(standbys.trusted_on(common_pb2.Chain(hops=[hop("s")]))) == []


def test_only_a_named_standby_guards_its_hop() -> None:
    standbys = StandbyHops({"a": StandbyHop(hop("s"), is_named=True), "b": StandbyHop(hop("t"))})
    assert standbys.guarded(common_pb2.Chain(hops=[hop("a"), hop("b"), hop("c")])) == ["a:1"]


def test_a_standby_that_is_lost_as_well_replaces_nothing() -> None:
    standbys = StandbyHops({"a": StandbyHop(hop("s")), "b": StandbyHop(hop("t"))})
    assert standbys.replacements({"a"}) == {"a": hop("s")}
    assert standbys.replacements({"a", "s"}) == {}
    assert standbys.replacements(set()) == {}


def test_a_new_chain_keeps_the_standbys_of_its_hops() -> None:
    num_placed = Counter({"of-a": 1})  # for another chain of the same process
    standbys = StandbyHops(num_placed=num_placed)
    for name in "abc":
        standbys.add(name, StandbyHop(hop(f"of-{name}")))
    assert num_placed == {"of-a": 2, "of-b": 1, "of-c": 1}
    left = list(standbys.settle(common_pb2.Chain(hops=[hop("a"), hop("of-b"), hop("d")])))
    assert left == [hop("of-c")]
    assert list(standbys.by_hop) == ["a"]
    assert num_placed == {"of-a": 2}
    standbys.clear()
    assert num_placed == {"of-a": 1}
