"""Moves: against brute force over all layouts that can be reached, and whether they ever end."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.router.placement import ENOUGH, HostedSpan, WeightMemory, attainable, choose_span, throughput
from corolla.router.rebalancing import MAX_LAYOUTS, Interruptions, Member, Move, Pool, are_few_and_unlike, next_move
from corolla.router.roster import Roster
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span


def member(
    number: int,
    span: Span,
    speed: float,
    *,
    is_movable: bool = True,
    head_blocks: float = 0.0,
    memory: WeightMemory = ENOUGH,
    capacity: int = 0,
    kind: str = "",
) -> Member:
    """A server; without a capacity, it has room for no more blocks than it holds."""
    hosted = HostedSpan(span, speed, head_blocks, kind)
    return Member(f"s{number}", hosted, is_movable, capacity or len(span), memory)


def after(members: Sequence[Member], move: Move) -> list[Member]:
    return [
        replace(each, hosted=replace(each.hosted, span=move.span)) if each.server_id == move.server_id else each
        for each in members
    ]


Worth = tuple[int, int, int]


def worth(members: Sequence[Member], num_blocks: int) -> Worth:
    servers = [each.hosted for each in members]
    per_block = throughput(servers, num_blocks)
    held = [(each.kind, each.span) for each in servers if each.kind]
    lone = Counter(kind for kind, span in held if held.count((kind, span)) == 1)
    is_unlike = are_few_and_unlike(members, num_blocks) and min(per_block) > 0
    slowest = attainable(servers, num_blocks) if is_unlike else min(per_block)
    return num_blocks - per_block.count(0), -sum(count // 2 for count in lone.values()), slowest


def covered(members: Sequence[Member], num_blocks: int) -> set[int]:
    return {block for each in members for block in range(each.hosted.span.start, each.hosted.span.end)}


def at(members: Sequence[Member], spans: Sequence[Span]) -> list[Member]:
    """The servers with other spans."""
    return [replace(each, hosted=replace(each.hosted, span=span)) for each, span in zip(members, spans, strict=True)]


def choices(each: Member, num_blocks: int) -> list[Span]:
    """The spans that a server can hold, and that lie within no other one of them."""
    fitting = [
        Span(start, end)
        for start in range(num_blocks)
        for end in range(start + 1, min(start + each.capacity, num_blocks) + 1)
        if each.memory.holds(Span(start, end), num_blocks)
    ]
    return [span for span in fitting if not any(other != span and other.covers(span) for other in fitting)]


def reachable(members: Sequence[Member], num_blocks: int, *, may_interrupt: bool) -> set[Worth]:
    """The values of all reachable layouts, by brute force."""
    first = tuple(each.hosted.span for each in members)
    seen, waiting = {first}, [first]
    possible = [choices(each, num_blocks) for each in members]
    while waiting:
        spans = waiting.pop()
        is_served = len(covered(at(members, spans), num_blocks)) == num_blocks
        for index, span in enumerate(spans):
            others = {
                block for other in (*spans[:index], *spans[index + 1 :]) for block in range(other.start, other.end)
            }
            may_leave = others.issuperset(range(span.start, span.end)) or (may_interrupt and not is_served)
            if not members[index].is_movable or not may_leave:
                continue
            for other in possible[index]:
                layout = (*spans[:index], other, *spans[index + 1 :])
                if layout not in seen:
                    seen.add(layout)
                    waiting.append(layout)
    return {worth(at(members, spans), num_blocks) for spans in seen}


def best_reachable(members: Sequence[Member], num_blocks: int) -> Worth:
    """Servers leave blocks that they alone hold only where nothing else covers all blocks, and that does."""
    best = max(reachable(members, num_blocks, may_interrupt=False))
    if best[0] == num_blocks:
        return best
    interrupted = max(reachable(members, num_blocks, may_interrupt=True))
    return interrupted if interrupted[0] == num_blocks else best


def follow(
    members: Sequence[Member], num_blocks: int, min_gain: float = 0.0, max_layouts: int = MAX_LAYOUTS
) -> list[list[Member]]:
    """The layouts that moves lead through, the first one included; checks each move's conditions."""
    way = [list(members)]
    while (move := next_move(way[-1], num_blocks, min_gain=min_gain, max_layouts=max_layouts)) is not None:
        mover = next(each for each in way[-1] if each.server_id == move.server_id)
        assert mover.is_movable
        assert move.span != mover.hosted.span
        assert move.span in choices(mover, num_blocks)
        # No block loses a server while this one is on its way, unless no answer can go on anyway.
        staying = [each for each in way[-1] if each is not mover]
        is_served = len(covered(way[-1], num_blocks)) == num_blocks
        assert covered(staying, num_blocks) == covered(way[-1], num_blocks) or not is_served
        way.append(after(way[-1], move))
        assert way[-1] not in way[:-1], "a layout comes twice"
    return way


@st.composite
def pools(draw: st.DrawFn, most_servers: int = 4, most_blocks: int = 7) -> tuple[list[Member], int]:
    """Layouts as joining makes them, or random ones; some servers have configured spans."""
    num_blocks = draw(st.integers(1, most_blocks))
    members: list[Member] = []
    head_blocks = draw(st.sampled_from([0.0, 0.0, 0.5, 4.0]))
    kinds = draw(st.sampled_from(["", "A", "AB"])) or [""]
    for number in range(draw(st.integers(1, most_servers))):
        speed = draw(st.sampled_from([1.0, 2.0, 3.0, 7.0]))
        length = draw(st.integers(1, num_blocks))
        if draw(st.booleans()):
            span = choose_span([each.hosted for each in members], num_blocks, length, speed, head_blocks)
        else:
            start = draw(st.integers(0, num_blocks - length))
            span = Span(start, start + length)
        is_movable = draw(st.integers(0, 4)) > 0
        memory = draw(st.sampled_from([ENOUGH, ENOUGH, WeightMemory(len(span) + 1.0, head_blocks)]))
        capacity = draw(st.integers(len(span), num_blocks)) if draw(st.booleans()) else len(span)
        each = member(number, span, speed, is_movable=is_movable, head_blocks=head_blocks, memory=memory)
        members.append(replace(each, capacity=capacity, hosted=replace(each.hosted, kind=draw(st.sampled_from(kinds)))))
    return members, num_blocks


@given(pools())
def test_moves_lead_to_the_best_layout_that_can_be_reached(pool: tuple[list[Member], int]) -> None:
    members, num_blocks = pool
    way = follow(members, num_blocks)
    best = best_reachable(members, num_blocks)
    if best in reachable(members, num_blocks, may_interrupt=False):
        assert worth(way[-1], num_blocks) == best
    else:
        # Once servers have left blocks that they alone held, others may cover all blocks in another way.
        assert worth(way[-1], num_blocks) == best_reachable(way[-1], num_blocks)
        assert worth(way[-1], num_blocks)[0] == num_blocks


@given(pools(), st.sampled_from([0.1, 0.25, 1.0]))
def test_moves_with_hysteresis_end_where_no_move_pays(pool: tuple[list[Member], int], min_gain: float) -> None:
    members, num_blocks = pool
    end = follow(members, num_blocks, min_gain)[-1]
    *given, slowest = worth(end, num_blocks)
    *best, best_slowest = best_reachable(end, num_blocks)
    assert best == given
    assert best_slowest <= slowest * (1 + min_gain)


@given(pools(most_servers=7, most_blocks=14), st.integers(1, 300))
def test_a_search_that_is_cut_short_still_comes_to_an_end_and_never_makes_it_worse(
    pool: tuple[list[Member], int], max_layouts: int
) -> None:
    members, num_blocks = pool
    way = follow(members, num_blocks, max_layouts=max_layouts)
    assert len(way) == 1 or worth(way[-1], num_blocks) > worth(way[0], num_blocks)


@given(pools(most_servers=6), st.integers(0, 63))
def test_no_server_leaves_its_blocks_to_one_that_is_not_ready(pool: tuple[list[Member], int], bits: int) -> None:
    members, num_blocks = pool
    members = [replace(each, is_ready=not bits >> number & 1) for number, each in enumerate(members)]
    move = next_move(members, num_blocks, min_gain=0.0)
    if move is not None:
        ready = [each for each in members if each.is_ready]
        staying = [each for each in ready if each.server_id != move.server_id]
        assert len(staying) == len(ready) - 1
        is_served = len(covered(members, num_blocks)) == num_blocks
        assert covered(staying, num_blocks) == covered(ready, num_blocks) or not is_served


@pytest.mark.parametrize(
    "num_servers, num_unready, is_settled", [(31, 0, True), (31, 1, False), (64, 2, True), (64, 3, False)]
)
def test_in_a_large_fleet_servers_move_while_few_others_come_and_go(
    num_servers: int, num_unready: int, is_settled: bool
) -> None:
    unready = [pb.PlacedServer(state=pb.SERVER_STATE_JOINING), pb.PlacedServer(state=pb.SERVER_STATE_DRAINING),
               pb.PlacedServer(state=pb.SERVER_STATE_READY, suspected=True)]  # fmt: skip
    ready = pb.PlacedServer(state=pb.SERVER_STATE_READY)
    servers = []
    for number in range(num_servers):
        placed = pb.PlacedServer(span=common_pb2.BlockSpan(end=1), server=pb.ServerDescription(server_id=f"s{number}"))
        placed.MergeFrom(unready[number] if number < num_unready else ready)
        servers.append(placed)
    roster = Roster("m", 1, 1, tuple(servers))
    assert roster.is_settled == is_settled
    (members,) = roster.members().values()
    # The one that drains is as good as gone.
    assert len(members) == num_servers - (num_unready > 1)
    assert sum(not each.is_ready for each in members) == num_unready - (num_unready > 1)


@pytest.mark.parametrize("num_speeds", [1, 40])
def test_of_a_large_fleet_a_bounded_number_of_layouts_is_looked_at(
    num_speeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = Counter[str]()
    worth_of = Pool.worth

    def counted(pool: Pool, *given: Any) -> tuple[int, int, int, int]:
        looks["layouts"] += 1
        return worth_of(pool, *given)

    monkeypatch.setattr(Pool, "worth", counted)
    spans = [Span(start, start + 10) for start in range(0, 70, 10)]
    members = [member(number, spans[number % 7], 100.0 + number % num_speeds) for number in range(400)]
    move = next_move(members, 80, min_gain=0.25)
    assert move is not None
    assert (move.span, move.covers) == (Span(70, 80), True)
    assert looks["layouts"] <= 2 * MAX_LAYOUTS


@settings(deadline=None, max_examples=20)
@given(pools(), st.randoms(use_true_random=False))
def test_unstable_speeds_do_not_move_servers_back_and_forth(pool: tuple[list[Member], int], rng: random.Random) -> None:
    members, num_blocks = pool
    restless = {each.server_id: each.hosted.speed for each in members}
    rests: list[Worth] = []
    for _ in range(40):
        wavering = [
            replace(each, hosted=replace(each.hosted, speed=restless[each.server_id] * rng.uniform(0.95, 1.05)))
            for each in members
        ]
        move = next_move(wavering, num_blocks, min_gain=0.25)
        if move is None:
            rests.append(worth(members, num_blocks))
            continue
        members = after(members, move)
    # The true speeds make each rest better than the one before: 5 % up or down does not count as a gain of 25 %.
    assert rests == sorted(rests)
    assert len(set(rests)) <= 3 + num_blocks
    assert len(rests) >= 25


@pytest.mark.parametrize("max_layouts", [1, 100, 4000])
def test_an_even_pool_stays_as_it_is(max_layouts: int) -> None:
    joined: list[HostedSpan] = []
    for _ in range(12):
        joined.append(HostedSpan(choose_span(joined, 24, 8, 50.0), 50.0))
    members = [Member(str(number), each, is_movable=True, capacity=8) for number, each in enumerate(joined)]
    assert next_move(members, 24, min_gain=0.2, max_layouts=max_layouts) is None


def test_a_server_shrinks_where_the_head_needs_room() -> None:
    large, small = WeightMemory(3.2, 0.3), WeightMemory(1.1, 0.3)
    members = [
        member(0, Span(1, 4), 10.0, memory=large, capacity=5),
        member(1, Span(0, 2), 10.0, memory=large, capacity=5),
    ]
    assert next_move(members, 5, min_gain=0.25) is None, "no two machines hold the model"
    members.append(member(2, Span(2, 3), 10.0, memory=small, capacity=5))
    assert next_move(members, 5, min_gain=0.25) == Move("s0", Span(3, 5), covers=True)
    # The block that is missing has a server again, so no other one leaves.
    assert next_move([*members, member(3, Span(4, 5), 10.0, is_movable=False)], 5, min_gain=0.25) is None


def test_a_server_grows_where_blocks_are_missing() -> None:
    members = [member(0, Span(3, 5), 10.0, capacity=3), member(1, Span(0, 2), 10.0)]
    assert next_move(members, 5, min_gain=0.25) == Move("s0", Span(2, 5), covers=True)
    assert next_move(members, 6, min_gain=0.25) is None, "another block would still be missing"
    assert next_move(members, 5, min_gain=0.25, may_interrupt=False) is None, "a lost server may return"


def test_no_server_leaves_blocks_alone_soon_after_a_loss() -> None:
    first, last = member(0, Span(0, 2), 10.0), member(1, Span(2, 5), 10.0)
    interruptions = Interruptions(60.0)
    interruptions.look("model", {"a": [first]}, 5, 0.0)
    assert interruptions.may_begin("model", "a", 0.0), "these never held all blocks"
    interruptions.look("model", {"a": [first, last], "b": [last]}, 5, 1.0)
    interruptions.look("model", {}, 5, 2.0)
    interruptions.look("model", {"a": [first], "b": [last]}, 5, 3.0)
    assert not interruptions.may_begin("model", "a", 60.9)
    assert interruptions.may_begin("model", "b", 3.0)
    assert interruptions.may_begin("another", "a", 3.0)
    assert interruptions.may_begin("model", "a", 61.0)
    interruptions.saw_nothing(300.0)
    interruptions.look("model", {"a": [first]}, 5, 301.0)
    assert not interruptions.may_begin("model", "a", 359.9), "the store may have lost its data meanwhile"
    assert interruptions.may_begin("model", "a", 360.0)


def test_a_server_does_not_grow_for_nothing() -> None:
    members = [member(number, Span(3, 5) if number < 2 else Span(0, 3), 10.0, capacity=3) for number in range(4)]
    assert next_move(members, 5, min_gain=0.25) is None


def test_a_slow_part_is_helped_if_that_pays() -> None:
    members = [member(number, Span(0, 3) if number < 3 else Span(3, 6), 10.0) for number in range(4)]
    assert next_move(members, 6, min_gain=0.25) == Move("s0", Span(3, 6), covers=False)
    assert next_move(members, 6, min_gain=1.0) is None


@pytest.mark.parametrize("speeds", [(10.0, 10.0), (30.0, 10.0)])
def test_servers_of_two_kinds_move_until_each_has_a_partner_of_its_kind(speeds: tuple[float, float]) -> None:
    halves = Span(0, 3), Span(3, 6)
    mixed = [
        member(2 * number + half, span, speed, kind=kind)
        for half, span in enumerate(halves)
        for number, (kind, speed) in enumerate(zip("AB", speeds, strict=True))
    ]
    held = {(each.hosted.kind, each.hosted.span) for each in follow(mixed, 6, min_gain=0.25)[-1]}
    assert held in ({("A", halves[0]), ("B", halves[1])}, {("A", halves[1]), ("B", halves[0])})


def test_of_three_lone_servers_one_becomes_a_partner() -> None:
    spans = Span(0, 3), Span(1, 4), Span(3, 6)
    for kind, is_moved in (("A", True), ("", False)):
        lone = [member(number, span, 10.0, kind=kind) for number, span in enumerate(spans)]
        assert (next_move(lone, 6, min_gain=0.25) is not None) == is_moved


def test_no_pair_is_broken_for_speed() -> None:
    """The blocks of the slow kind would be faster with one server of the fast kind."""
    spans, speeds = {"A": Span(0, 3), "B": Span(3, 6)}, {"A": 90.0, "B": 10.0}
    pairs = [member(number, spans[kind], speeds[kind], kind=kind) for number, kind in enumerate("AABB")]
    assert next_move(pairs, 6, min_gain=0.25) is None
    third = [*pairs, member(4, spans["A"], speeds["A"], kind="A")]
    assert next_move(third, 6, min_gain=0.25) == Move("s0", spans["B"], covers=False)
