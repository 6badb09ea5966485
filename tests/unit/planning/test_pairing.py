"""Sessions over several replicas of each span share few routes, and no replica is left idle or flooded."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.planning.pairing import MAX_DETOUR, with_partners
from corolla.planning.planner import Candidate, PlannedChain, plan
from corolla.planning.replicas import PlannedSession, Replicas
from tests.unit.planning.test_planner import check_form, clusters, server

NUM_BLOCKS = 6


def route_of(chain: PlannedChain) -> tuple[str, ...]:
    return tuple(hop.server.server_id for hop in chain.hops)


def placed_sessions(spans: list[str], num_sessions: int) -> Counter[tuple[str, ...]]:
    """The routes of sessions that come one by one and stay; each makes its servers a little slower."""
    rng, held, routes = random.Random(3), Counter[str](), Counter[tuple[str, ...]]()
    for _ in range(num_sessions):
        servers = [server(f"s{n}", span, 0.01 * (1 + 0.05 * held[f"s{n}"])) for n, span in enumerate(spans)]
        rng.shuffle(servers)
        route = route_of(with_partners(plan(servers, NUM_BLOCKS), Replicas(servers), PlannedSession()))
        held.update(route)
        routes[route] += 1
    return routes


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_equal_replicas_make_as_many_routes_as_there_are_of_each(num_replicas: int) -> None:
    routes = placed_sessions([*["0:3"] * num_replicas, *["3:6"] * num_replicas], 30 * num_replicas)
    assert len(routes) == num_replicas
    assert max(routes.values()) - min(routes.values()) <= 1


def test_long_chains_stay_together() -> None:
    assert len(placed_sessions(["0:2", "0:2", "2:4", "2:4", "4:6", "4:6"], 40)) == 2


def test_fewer_replicas_behind_are_shared() -> None:
    routes = placed_sessions(["0:3", "0:3", "0:3", "3:6", "3:6"], 60)
    loads = sorted(Counter(last for _, last in routes.elements()).values())
    assert sum(count for _, count in routes.most_common(3)) >= 50
    assert loads[1] <= (loads[0] + 20) * (1 + MAX_DETOUR) - 20 + 1


def test_more_replicas_behind_are_all_used() -> None:
    routes = placed_sessions(["0:3", "3:6", "3:6"], 60)
    assert sorted(routes.values()) == [30, 30]


def test_several_partners_share_what_comes_from_one() -> None:
    routes = placed_sessions(["0:3", "0:3", "3:6", "3:6", "3:6", "3:6"], 80)
    assert sorted(routes.values()) == [20, 20, 20, 20]


@pytest.mark.parametrize(
    "facts",
    [
        {"has_pages": False}, {"is_suspected": True}, {"queue_seconds": 1.0}, {"zone": "b"}, {"fingerprint": "g"},
        {"seconds_per_block": 0.02},
    ],
)  # fmt: skip
def test_a_partner_that_is_no_good_is_left_out(facts: dict[str, object]) -> None:
    speed = {"seconds_per_block": 0.01}
    first, spare = server("a", "0:3", 0.01), server("c", "3:6", 0.01)
    partner = server("b", "3:6", **(speed | facts))  # type: ignore[arg-type]
    chain = plan([first, spare], NUM_BLOCKS)
    assert route_of(with_partners(chain, Replicas([spare, partner, first]), PlannedSession())) == ("a", "c")


def test_a_partner_in_the_zone_is_found_among_those_of_the_zone() -> None:
    servers = [server(name, "0:3", 0.01, zone="z") for name in ("a2", "a3")]
    servers += [server(name, "3:6", 0.01, zone="z") for name in ("b2", "b3")]
    away = [server("a1", "0:3", 0.01, zone="y"), server("b1", "3:6", 0.01, zone="y"), server("b0", "3:6", zone="y")]
    chain = plan([servers[1], servers[2]], NUM_BLOCKS)
    assert route_of(with_partners(chain, Replicas([*away, *servers]), PlannedSession())) == ("a3", "b3")


@settings(max_examples=300)
@given(clusters(), st.randoms())
def test_it_stays_a_chain_and_hardly_a_slower_one(cluster: tuple[list[Candidate], int], rng: random.Random) -> None:
    servers, num_blocks = cluster
    rng.shuffle(servers)
    try:
        planned = plan(servers, num_blocks)
    except (NoChain, OutOfPages):
        return
    chain = with_partners(planned, Replicas(servers), PlannedSession())
    check_form(chain, num_blocks)
    assert [hop.span for hop in chain.hops] == [hop.span for hop in planned.hops]
    assert chain.hops[0] == planned.hops[0]
    for hop, cheapest in zip(chain.hops, planned.hops, strict=True):
        seconds = hop.server.queue_seconds + len(hop.span) * hop.server.seconds_per_block
        least = cheapest.server.queue_seconds + len(cheapest.span) * cheapest.server.seconds_per_block
        assert seconds <= least * (1 + MAX_DETOUR) + 1e-9
        assert hop.server.zone == cheapest.server.zone
