"""Chains against brute force, the cause of a missing chain, and how equal replicas share sessions."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.planning.bookings import Booked
from corolla.planning.candidates import candidates
from corolla.planning.planner import HOP_SECONDS, OTHER_ZONE_SECONDS, Candidate, PlannedChain, plan, plan_blocks
from corolla.planning.replicas import PlannedSession
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span
from tests.unit.planning import listing_planner


def server(name: str, span: str, seconds_per_block: float = 1.0, **facts: object) -> Candidate:
    facts = {"fingerprint": "f", **facts}
    return Candidate(name, f"{name}:1", span=Span.parse(span), seconds_per_block=seconds_per_block, **facts)  # type: ignore[arg-type]


def cost(route: Sequence[tuple[Candidate, int, int]]) -> float:
    seconds = 0.0
    for each, start, end in route:
        seconds += HOP_SECONDS + each.queue_seconds + (end - start) * each.seconds_per_block
    return seconds + sum(
        OTHER_ZONE_SECONDS for (left, *_), (right, *_) in itertools.pairwise(route) if left.zone != right.zone
    )


def every_chain(
    servers: Sequence[Candidate], num_blocks: int, boundary: int = 0, used: tuple[str, ...] = ()
) -> Iterator[list[tuple[Candidate, int, int]]]:
    """All chains over all boundaries that take no server twice."""
    if boundary == num_blocks:
        yield []
        return
    for each in servers:
        if each.server_id in used or not each.span.start <= boundary < each.span.end:
            continue
        for end in range(boundary + 1, each.span.end + 1):
            for rest in every_chain(servers, num_blocks, end, (*used, each.server_id)):
                yield [(each, boundary, end), *rest]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Candidate], int]:
    num_blocks = draw(st.integers(1, 7))
    servers = []
    for index in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, num_blocks - 1))
        servers.append(
            Candidate(
                f"s{index}", f"s{index}:1", draw(st.sampled_from("ffg")),
                Span(start, draw(st.integers(start + 1, num_blocks))), draw(st.sampled_from([0.00025, 0.002, 0.006])),
                draw(st.sampled_from([0.0, 0.0, 0.004])), draw(st.sampled_from("aab")),
                draw(st.sampled_from([True, True, True, False])),
            )
        )  # fmt: skip
    return servers, num_blocks


def check_form(chain: PlannedChain, num_blocks: int) -> None:
    assert [hop.span.start for hop in chain.hops] == [0, *(hop.span.end for hop in chain.hops[:-1])]
    assert chain.hops[-1].span.end == num_blocks
    assert all(hop.server.span.covers(hop.span) for hop in chain.hops)
    assert {hop.server.fingerprint for hop in chain.hops} == {chain.fingerprint}
    assert all(hop.server.has_pages for hop in chain.hops)
    assert len({hop.server.server_id for hop in chain.hops}) == len(chain.hops)


def is_taken_again(servers: Sequence[Candidate], num_blocks: int) -> bool:
    """Whether a span lies strictly inside another: only then may the cheapest chain be out of reach."""
    return any(a.span.start < b.span.start and b.span.end < a.span.end for a in servers for b in servers)


@settings(max_examples=300)
@given(clusters())
def test_the_plan_is_the_cheapest_of_all_chains(cluster: tuple[list[Candidate], int]) -> None:
    servers, num_blocks = cluster
    usable = [each for each in servers if each.has_pages]
    costs_of_all = [
        cost(route)
        for fingerprint in "fg"
        for route in every_chain([each for each in usable if each.fingerprint == fingerprint], num_blocks)
    ]
    try:
        chain = plan(servers, num_blocks)
    except (NoChain, OutOfPages):
        assert costs_of_all == []
        return
    check_form(chain, num_blocks)
    assert chain.seconds == pytest.approx(cost([(hop.server, hop.span.start, hop.span.end) for hop in chain.hops]))
    if is_taken_again(usable, num_blocks):
        assert chain.seconds >= min(costs_of_all) - 1e-9
    else:
        assert chain.seconds == pytest.approx(min(costs_of_all))


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[Candidate], Span]:
    """Up to 30 servers of a placement, some excluded and some booked, no two of one speed; and which blocks to plan."""
    num_blocks = draw(st.integers(1, 40))
    source = random.Random(draw(st.integers(0, 2**32)))
    servers, booked = [], {}
    for index in range(draw(st.integers(1, 30))):
        start, end = sorted(source.sample(range(num_blocks + 1), 2))
        placed = pb.PlacedServer(span=Span(start, end).to_message(), state=pb.SERVER_STATE_READY)
        placed.server.server_id, placed.server.address = f"s{index}", f"s{index}:1"
        placed.server.fingerprint, placed.server.zone = source.choice("ffffg"), source.choice("abc")
        placed.server.decode_tokens_per_second = source.uniform(50, 5000)
        placed.load.num_sessions, placed.load.num_queued_steps = source.randrange(20), source.choice([0, 0, 1, 5])
        placed.load.max_session_tokens = source.choice([50, 100, 1000])
        booked[f"s{index}"] = Booked(source.randrange(3), source.randrange(100))
        servers.append(placed)
    excluded = {f"s{source.randrange(40)}" for _ in range(source.randrange(3))}
    part = sorted(source.sample(range(num_blocks + 1), 2))
    blocks = source.choice([Span(0, num_blocks), Span(*part)])
    session = PlannedSession(40, excluded, booked.__getitem__)
    return [each for server in candidates(servers) if (each := session.counted(server)) is not None], blocks


@settings(max_examples=300)
@given(placements())
def test_the_plan_is_that_of_a_planner_that_lists_every_hop(placement: tuple[list[Candidate], Span]) -> None:
    servers, blocks = placement
    groups = [[each for each in servers if each.fingerprint == fingerprint] for fingerprint in "fg"]
    listed = [chain for group in groups if (chain := listing_planner.cheapest(group, blocks)) is not None]
    try:
        chain = plan_blocks(servers, blocks)
    except (NoChain, OutOfPages):
        assert listed == []
        return
    assert chain == min(listed, key=lambda each: each.seconds)


@given(clusters())
def test_without_a_chain_the_right_cause_is_named(cluster: tuple[list[Candidate], int]) -> None:
    servers, num_blocks = cluster
    lacking = [
        [
            b
            for b in range(num_blocks)
            if not any(s.fingerprint == f and s.span.start <= b < s.span.end for s in servers)
        ]
        for f in {each.fingerprint for each in servers} or {"f"}
    ]
    try:
        plan(servers, num_blocks)
    except NoChain as failure:
        spans = [Span.parse(text) for text in failure.metadata["uncovered_blocks"].split(",")]
        assert [b for span in spans for b in range(span.start, span.end)] in lacking
        assert sum(map(len, spans)) == min(map(len, lacking)) > 0
    except OutOfPages:
        assert [] in lacking


def test_a_server_left_for_a_faster_one_inside_it_is_not_taken_again() -> None:
    chain = plan([server("long", "0:30", 10.0), server("inner", "10:20", 0.01)], 30)
    check_form(chain, 30)
    assert [str(hop.span) for hop in chain.hops] == ["0:30"]
    with_another = plan(
        [server("long", "0:30", 10.0), server("inner", "10:20", 0.01), server("other", "15:30", 10.5)], 30
    )
    check_form(with_another, 30)


def test_the_example_of_the_planners_description() -> None:
    servers = [
        server("a1", "0:4", 0.010, zone="A"),
        server("a2", "4:8", 0.010, zone="A"),
        server("b1", "0:4", 0.008, zone="B"),
        server("b2", "4:8", 0.012, zone="B"),
        server("c", "2:6", 0.004, zone="A"),
        server("d", "0:8", 0.020, zone="A"),
    ]
    a1, a2, *_, d = servers
    chain = plan(servers, 8)
    assert [(hop.server.server_id, str(hop.span)) for hop in chain.hops] == [("b1", "0:2"), ("c", "2:6"), ("a2", "6:8")]
    assert chain.seconds == pytest.approx(0.057)
    assert plan([a1, a2], 8).seconds == pytest.approx(0.082)
    assert plan([d], 8).seconds == pytest.approx(0.161)
    # The steps of the example: the cheapest way to each boundary.
    assert plan_blocks([servers[2]], Span(0, 2)).seconds == pytest.approx(0.017)
    assert plan_blocks([a1], Span(0, 2)).seconds == pytest.approx(0.021)
    assert plan_blocks([servers[2], servers[4]], Span(0, 6)).seconds == pytest.approx(0.036)
    assert plan([servers[2], servers[3], servers[4]], 8).seconds == pytest.approx(0.063)


def test_shuffled_equals_share_the_sessions() -> None:
    replicas = [server(f"{half}{index}", span) for half, span in (("l", "0:5"), ("r", "5:10")) for index in range(3)]
    source = random.Random(7)
    taken: Counter[str] = Counter()
    for _ in range(300):
        shuffled = source.sample(replicas, len(replicas))
        taken.update(hop.server.server_id for hop in plan(shuffled, 10).hops)
    assert len(taken) == 6
    assert min(taken.values()) > 60
