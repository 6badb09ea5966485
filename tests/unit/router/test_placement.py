"""Spans: against brute force, and the cover that joining servers make."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from corolla.chassis.errors import SpanRefused
from corolla.router.layout import Layout
from corolla.router.placement import HostedSpan, WeightMemory, attainable, choose_span, throughput
from corolla.router.roster import Roster
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span, gaps

HEADS = st.sampled_from([0.0, 0.0, 0.4, 3.0, 20.0])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[HostedSpan], int]:
    num_blocks = draw(st.integers(1, 14))
    servers = []
    for _ in range(draw(st.integers(0, 5))):
        start = draw(st.integers(0, num_blocks - 1))
        end = draw(st.integers(start + 1, num_blocks))
        speed, head_blocks = draw(st.sampled_from([0.0, 1.0, 2.0, 60.0, 250.0])), draw(HEADS)
        servers.append(HostedSpan(Span(start, end), speed, head_blocks))
    return servers, num_blocks


@given(clusters(), st.integers(1, 16), st.sampled_from([1.0, 7.0, 100.0]), HEADS)
def test_the_chosen_span_is_the_best_of_all(
    cluster: tuple[list[HostedSpan], int], capacity: int, speed: float, head_blocks: float
) -> None:
    servers, num_blocks = cluster
    length = min(capacity, num_blocks)

    def after(span: Span) -> list[int]:
        return sorted(throughput([*servers, HostedSpan(span, speed, head_blocks)], num_blocks))

    chosen = choose_span(servers, num_blocks, capacity, speed, head_blocks)
    spans = [Span(start, start + length) for start in range(num_blocks - length + 1)]
    # Beside the head there may be fewer blocks.
    spans += [Span(start, num_blocks) for start in range(num_blocks - length, num_blocks) if head_blocks]
    assert chosen in spans
    # Lists compare block by block from the least: the order that the placement promises.
    assert after(chosen) == max(map(after, spans))


@given(clusters())
def test_what_is_attainable_is_the_least_that_any_set_of_blocks_leaves(cluster: tuple[list[HostedSpan], int]) -> None:
    servers, num_blocks = cluster
    num_blocks = min(num_blocks, 8)
    servers = [each for each in servers if each.span.end <= num_blocks]
    heads = max((each.head_blocks for each in servers), default=0.0)
    weights = [*[1000] * num_blocks, round(1000 * heads)]
    masks = []
    for each in servers:
        blocks = range(each.span.start, each.span.end + (each.span.end == num_blocks))
        masks.append((sum(1 << block for block in blocks), round((each.speed or 1.0) * 1e6)))
    least = min(
        Fraction(1000 * sum(speed for mask, speed in masks if mask & chosen), weight)
        for chosen in range(1, 1 << len(weights))
        if (weight := sum(each for block, each in enumerate(weights) if chosen >> block & 1))
    )
    assert attainable(servers, num_blocks) == math.floor(least)


def test_the_example_of_what_is_attainable() -> None:
    servers = [HostedSpan(Span(0, 4), 1.0), HostedSpan(Span(0, 2), 3.0)]
    assert min(throughput(servers, 4)) == 250_000
    assert attainable(servers, 4) == 500_000


def joined(order: str, num_blocks: int = 30) -> dict[str, list[str]]:
    """The spans of servers that join in this order, by kind. Each holds half of the blocks; kind A is twice as fast."""
    servers: list[HostedSpan] = []
    for kind in order:
        speed = 20.0 if kind == "A" else 10.0
        span = choose_span(servers, num_blocks, num_blocks // 2, speed, kind=kind)
        servers.append(HostedSpan(span, speed, kind=kind))
    return {kind: [str(each.span) for each in servers if each.kind == kind] for kind in sorted(set(order))}


def test_a_server_joins_a_lone_one_of_its_kind_before_it_helps_the_slowest_block() -> None:
    assert joined("ABA") == {"A": ["0:15", "0:15"], "B": ["15:30"]}
    # A third one is lone wherever it goes.
    assert joined("ABAA") == {"A": ["0:15", "0:15", "15:30"], "B": ["15:30"]}
    assert joined("ABAAA") == {"A": ["0:15", "0:15", "15:30", "15:30"], "B": ["15:30"]}
    assert joined("ABAB") == {"A": ["0:15", "0:15"], "B": ["15:30", "15:30"]}


def test_a_server_covers_a_gap_before_it_makes_a_pair() -> None:
    assert joined("AA") == {"A": ["0:15", "15:30"]}


@given(st.lists(st.sampled_from("AB"), max_size=8).map("".join))
def test_a_kind_has_one_lone_server_at_most_but_for_those_that_covered_a_gap(order: str) -> None:
    covering = order[:2]
    for kind, spans in joined(order).items():
        lone = [span for span in spans if spans.count(span) == 1]
        assert len(lone) <= max(1, covering.count(kind))


@pytest.mark.parametrize(
    "others, capacity, expected",
    [
        # The lone server on the slower blocks gets the partner.
        ([(0, 10, "A"), (10, 20, "A"), (0, 10, "B")], 10, "10:20"),
        # A longer span holds the blocks of both.
        ([(0, 5, "A"), (5, 10, "A"), (10, 20, "B")], 10, "0:10"),
        # Servers of other kinds, and of no known kind, do not count as partners.
        ([(0, 10, "B"), (0, 10, ""), (10, 20, "B")], 10, "10:20"),
        # A server that holds more blocks is a partner as well; one that holds a part does not count.
        ([(0, 10, "A"), (0, 20, "A"), (0, 10, "B"), (10, 20, "B")], 10, "10:20"),
        ([(0, 12, "A"), (0, 12, "B"), (12, 20, "B")], 10, "10:20"),
    ],
)
def test_partners_hold_all_blocks_of_each_other(
    others: list[tuple[int, int, str]], capacity: int, expected: str
) -> None:
    servers = [HostedSpan(Span(start, end), 10.0, kind=kind) for start, end, kind in others]
    assert str(choose_span(servers, 20, capacity, 10.0, kind="A")) == expected


@given(clusters(), st.integers(1, 16), HEADS)
def test_without_a_kind_only_throughput_counts(
    cluster: tuple[list[HostedSpan], int], capacity: int, head_blocks: float
) -> None:
    servers, num_blocks = cluster
    of_kinds = [replace(each, kind=kind) for each, kind in zip(servers, itertools.cycle(("", "A", "B")), strict=False)]
    plain = choose_span(servers, num_blocks, capacity, 7.0, head_blocks)
    assert choose_span(of_kinds, num_blocks, capacity, 7.0, head_blocks) == plain
    assert choose_span(servers, num_blocks, capacity, 7.0, head_blocks, kind="A") == plain


@given(clusters())
def test_throughput_is_the_sum_of_the_servers_shares(cluster: tuple[list[HostedSpan], int]) -> None:
    servers, num_blocks = cluster
    for block, held in enumerate(throughput(servers, num_blocks)):
        shares = [
            Fraction(each.speed or 1.0) / (len(each.span) + Fraction(each.head_blocks) * (each.span.end == num_blocks))
            for each in servers
            if each.span.start <= block < each.span.end
        ]
        assert abs(Fraction(held, 1_000_000) - sum(shares)) <= Fraction(len(shares), 1_000_000)
    missing = gaps([each.span for each in servers], Span(0, num_blocks))
    in_gaps = [block for gap in missing for block in range(gap.start, gap.end)]
    assert in_gaps == [block for block, held in enumerate(throughput(servers, num_blocks)) if held == 0]
    assert all(left.end < right.start for left, right in itertools.pairwise(missing))


@given(
    st.integers(1, 40), st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 1e4)), min_size=1, max_size=12), HEADS
)
def test_joining_servers_cover_as_soon_as_their_capacities_suffice(
    num_blocks: int, newcomers: list[tuple[int, float]], head_blocks: float
) -> None:
    servers: list[HostedSpan] = []
    total = 0
    for capacity, speed in newcomers:
        span = choose_span(servers, num_blocks, capacity, speed, head_blocks)
        servers.append(HostedSpan(span, speed, head_blocks))
        total += capacity
        assert sum(map(len, gaps([each.span for each in servers], Span(0, num_blocks)))) == max(0, num_blocks - total)


MEMORIES = st.builds(
    WeightMemory,
    st.sampled_from([1.5, 2.0, 3.0, 4.5, 6.0, 10.0, 12.7, 20.0]),
    st.sampled_from([0.0, 0.5, 1.0, 2.5, 4.0, 8.0]),
    st.booleans(),
)


@given(clusters(), st.integers(1, 16), MEMORIES)
def test_a_chosen_span_fits_into_the_memory(
    cluster: tuple[list[HostedSpan], int], capacity: int, memory: WeightMemory
) -> None:
    servers, num_blocks = cluster
    fitting = [
        Span(start, end)
        for start in range(num_blocks)
        for end in range(start + 1, min(start + capacity, num_blocks) + 1)
        if memory.holds(Span(start, end), num_blocks)
    ]
    try:
        chosen = choose_span(servers, num_blocks, capacity, 10.0, memory.edge_blocks, memory)
    except SpanRefused:
        assert fitting == []
        return
    assert chosen in fitting
    assert Span(chosen.start, chosen.end + 1) not in fitting, "there was room for more"


@given(st.integers(2, 32), MEMORIES)
def test_equal_servers_cover_as_soon_as_their_memory_suffices(num_blocks: int, memory: WeightMemory) -> None:
    at_an_end = math.floor(memory.num_blocks - memory.edge_blocks)
    if memory.holds(Span(0, num_blocks), num_blocks):
        num_needed = 1
    else:
        assume(at_an_end > 0)
        num_needed = 2 + math.ceil(max(0, num_blocks - 2 * at_an_end) / math.floor(memory.num_blocks))
    servers: list[HostedSpan] = []
    for _ in range(num_needed):
        span = choose_span(servers, num_blocks, num_blocks, 10.0, memory.edge_blocks, memory)
        servers.append(HostedSpan(span, 10.0, memory.edge_blocks))
    assert gaps([each.span for each in servers], Span(0, num_blocks)) == []


def test_weights_that_lie_at_both_ends_count_once_where_they_are_tied() -> None:
    whole = Span(0, 10)
    assert WeightMemory(14.0, 4.0, are_edges_tied=True).holds(whole, 10)
    assert not WeightMemory(14.0, 4.0).holds(whole, 10)
    assert WeightMemory(18.0, 4.0).holds(whole, 10)


@pytest.mark.parametrize(
    "capacities, spans",
    [
        ([10, 10, 10], ["0:10", "10:20", "20:30"]),
        ([12, 12, 12], ["0:12", "12:24", "18:30"]),
        ([30], ["0:30"]),
        ([99], ["0:30"]),
        ([10, 10, 10, 10], ["0:10", "10:20", "20:30", "0:10"]),
        ([7, 20, 3], ["0:7", "7:27", "27:30"]),
    ],
)
def test_gaps_are_filled_side_by_side(capacities: list[int], spans: list[str]) -> None:
    """Among equal ones, the first."""
    servers: list[HostedSpan] = []
    for capacity in capacities:
        servers.append(HostedSpan(choose_span(servers, 30, capacity, 10.0), 10.0))
    assert [str(each.span) for each in servers] == spans


def test_a_new_server_fills_the_gap_that_fits_its_capacity() -> None:
    # Gaps 0:5 and 8:11: three blocks fill the second whole, so that five find the first whole.
    servers = [HostedSpan(Span(5, 8), 1.0), HostedSpan(Span(11, 20), 3.0)]
    assert str(choose_span(servers, 20, 3, 1.0)) == "8:11"


joining_servers = st.builds(
    pb.ServerDescription,
    fingerprint=st.sampled_from("ffg"), num_model_blocks=st.just(12), capacity_blocks=st.integers(1, 12),
    decode_tokens_per_second=st.sampled_from([0.0, 1.0, 2.0, 30.0]), head_blocks=HEADS,
    weight_blocks=st.sampled_from([0.0, 8.0]), kind=st.sampled_from(["", "a", "b"]),
)  # fmt: skip


@given(st.lists(joining_servers, max_size=4), st.lists(joining_servers, max_size=6))
def test_servers_that_join_in_a_row_get_the_spans_that_they_would_get_alone(
    earlier: list[pb.ServerDescription], later: list[pb.ServerDescription]
) -> None:
    """Where no speed is beyond belief: what is believed of a server depends on who is there when it joins."""
    placed: list[pb.PlacedServer] = []
    in_a_row: Layout | None = None
    for number, server in enumerate([*earlier, *later]):
        server.server_id, server.address = f"s{number}", f"host-{number}:1"
        alone = Layout(Roster("m", number, 12, tuple(placed)))
        if number == len(earlier):
            in_a_row = alone
        assert not alone.has(server)
        try:
            span = alone.choose(server, None)
        except SpanRefused:
            continue
        placed.append(pb.PlacedServer(server=server, span=span.to_message()))
        if in_a_row is not None:
            assert in_a_row.choose(server, None) == span
            in_a_row.add(server, span, number + 1, f"{number}-0")
            assert in_a_row.has(server)
            assert (in_a_row.version, in_a_row.last_change) == (number + 1, f"{number}-0")
