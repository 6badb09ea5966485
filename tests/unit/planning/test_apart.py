"""Chains lead through no two neighbours that do not reach each other, while there is another chain."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.planning.apart import MOST_PLANS, Apart, pairs_apart, plan_together
from corolla.planning.pairing import with_partners
from corolla.planning.planner import Candidate, PlannedChain, plan
from corolla.planning.replicas import PlannedSession, Replicas
from corolla.v1 import router_pb2 as pb
from tests.unit.planning.test_planner import check_form, clusters, server


def without(servers: Sequence[Candidate], server_ids: frozenset[str], num_blocks: int) -> PlannedChain:
    return plan([each for each in servers if each.server_id not in server_ids], num_blocks)


def ids(chain: PlannedChain) -> list[str]:
    return [hop.server.server_id for hop in chain.hops]


def test_the_example_of_the_description() -> None:
    speeds = {"a1": 0.002, "a2": 0.004, "b1": 0.002, "b2": 0.003}
    servers = [server(name, "0:4" if name[0] == "a" else "4:8", speed) for name, speed in speeds.items()]
    plans = [without(servers, frozenset(left_out), 8) for left_out in ((), ("b1",), ("a1",))]
    assert [ids(each) for each in plans] == [["a1", "b1"], ["a1", "b2"], ["a2", "b1"]]
    assert [round(each.seconds * 1000) for each in plans] == [18, 22, 26]
    chosen = plan_together(Apart([("a1", "b1")]), lambda server_ids: without(servers, server_ids, 8))
    assert ids(chosen) == ["a1", "b2"]


def test_the_last_server_sends_to_the_first_one() -> None:
    apart = Apart([("c", "a")])
    assert apart.among(["a", "b", "c"]) == ("c", "a")
    assert apart.among(["a", "b", "c", "d"]) is None, "they are no neighbours"
    assert apart.of("a") == {"c"}
    assert apart.of("ab") == {"c"}
    assert Apart([("a", "b")], apart).of("a") == {"b", "c"}
    assert apart.of("b") == frozenset(), "more pairs change no known ones"


def test_a_pair_is_taken_where_no_other_chain_is_found() -> None:
    servers = [server("a", "0:4"), server("b", "4:8")]
    assert ids(plan_together(Apart([("b", "a")]), lambda server_ids: without(servers, server_ids, 8))) == ["a", "b"]
    with pytest.raises(NoChain):
        plan_together(Apart(), lambda server_ids: without(servers, server_ids, 8), {"b"})


@pytest.mark.parametrize("num_replicas", [1, 3, 40])
def test_a_network_that_is_cut_in_two_is_planned_on_one_side(num_replicas: int) -> None:
    rng = random.Random(num_replicas)
    sides = [
        [server(f"{side}{span}{number}", span, rng.uniform(0.001, 0.002)) for span in ("0:4", "4:8")
         for number in range(num_replicas)]
        for side in "lr"
    ]  # fmt: skip
    servers = [*sides[0], *sides[1]]
    apart = Apart((left.server_id, right.server_id) for left, right in itertools.product(*sides))
    num_plans = 0

    def planned(server_ids: frozenset[str]) -> PlannedChain:
        nonlocal num_plans
        num_plans += 1
        return without(servers, server_ids, 8)

    chain = plan_together(apart, planned)
    assert len({each[0] for each in ids(chain)}) == 1
    assert num_plans <= MOST_PLANS


@settings(max_examples=300)
@given(clusters(), st.randoms())
def test_two_pairs_cost_no_more_than_to_leave_out_one_of_each(
    cluster: tuple[list[Candidate], int], rng: random.Random
) -> None:
    servers, num_blocks = cluster
    pairs = list(itertools.combinations([each.server_id for each in servers], 2))
    pairs = rng.sample(pairs, min(2, len(pairs)))
    apart, least = Apart(pairs), math.inf
    for left_out in itertools.product(*pairs):
        try:
            least = min(least, without(servers, frozenset(left_out), num_blocks).seconds)
        except (NoChain, OutOfPages):
            continue
    try:
        chain = plan_together(apart, lambda server_ids: without(servers, server_ids, num_blocks))
    except (NoChain, OutOfPages):
        assert math.isinf(least)
        return
    check_form(chain, num_blocks)
    if math.isfinite(least):
        assert apart.among(ids(chain)) is None
        assert chain.seconds <= least


@pytest.mark.parametrize("pair, chosen", [(("a1", "b1"), "b2"), (("a2", "b1"), "b1"), (("b1", "b2"), "b1")])
def test_a_partner_reaches_the_other_hops(pair: tuple[str, str], chosen: str) -> None:
    servers = [server(name, "0:4" if name[0] == "a" else "4:8", 0.01) for name in ("a1", "a2", "b1", "b2")]
    chain = plan([servers[0], servers[3]], 8)
    session = PlannedSession(apart=Apart([pair]))
    assert ids(with_partners(chain, Replicas(servers), session)) == ["a1", chosen]


def test_a_placement_names_pairs_by_addresses() -> None:
    servers = [
        pb.PlacedServer(
            server=pb.ServerDescription(server_id=name, address=f"{name}:1"),
            load=pb.ServerLoad(unreachable=unreachable),
        )
        for name, unreachable in (("a", ["b:1", "gone:1", "a:1"]), ("b", []), ("c", ["a:1"]))
    ]  # fmt: skip
    assert list(pairs_apart(servers)) == [("a", "b"), ("c", "a")]
