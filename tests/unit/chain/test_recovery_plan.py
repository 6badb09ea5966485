"""Lanes against a chain of integers, in which every hop's output depends on all tokens before."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.recovery_plan import CLIENT, ReplaySegment, plan_segments, start_for
from corolla.v1 import blocks_pb2 as pb


def holds(num_tokens: int, min_position: int = 0, kept_start: int = 0, kept_end: int = 0) -> pb.Opened:
    """What a hop answers that holds so many tokens, and has kept the outputs of `[kept_start, kept_end)`."""
    return pb.Opened(num_cached_tokens=num_tokens, min_position=min_position, kept_start=kept_start, kept_end=kept_end)


@st.composite
def states_of(draw: st.DrawFn, position: int) -> list[pb.Opened]:
    hops = []
    for _ in range(draw(st.integers(1, 6))):
        num_held = draw(st.sampled_from([0, position, position + 3, draw(st.integers(0, position))]))
        min_position = draw(st.sampled_from([0, 0, draw(st.integers(0, num_held))]))
        kept_start = draw(st.integers(0, num_held))
        kept_end = draw(st.sampled_from([kept_start, num_held]))
        hops.append(holds(num_held, min_position, kept_start, kept_end))
    return hops


positions = st.integers(1, 12)
chains = positions.flatmap(lambda position: st.tuples(st.just(position), states_of(position)))


def output(hop: int, token: int) -> tuple[int, int]:
    """A hop's output for a token, if its input is right and it holds all tokens before."""
    return (hop, token)


class Hop:
    """Cache and boundary activations of one hop, by token."""

    def __init__(self, number: int, state: pb.Opened) -> None:
        self.number = number
        self.state = state
        self.held = list(range(state.num_cached_tokens))
        self.kept = {token: output(number, token) for token in range(state.kept_start, state.kept_end)}

    def process(self, token: int, given: tuple[int, int], cache: list[int]) -> tuple[int, int]:
        assert given == output(self.number - 1, token), "the input is not the one of the token"
        if token < len(cache):
            assert token == 0 or token >= self.state.min_position, "the window has moved beyond"
            del cache[token:]
        assert len(cache) == token, "a gap"
        cache.append(token)
        return output(self.number, token)


def run(hops: list[Hop], segment: ReplaySegment) -> None:
    scratch = {number: list(range(segment.start)) for number in segment.scratch}
    for token in range(segment.start, segment.end):
        state = output(CLIENT, token) if segment.source == CLIENT else hops[segment.source].kept[token]
        for number in segment.hops:
            state = hops[number].process(token, state, scratch.get(number, hops[number].held))


@given(chains, st.booleans(), st.data())
def test_after_the_lanes_every_hop_holds_all_and_no_other_was_touched(
    chain: tuple[int, list[pb.Opened]], may_scratch: bool, data: st.DataObject
) -> None:
    position, states = chain
    hops = [Hop(number, state) for number, state in enumerate(states)]
    segments = [
        replace(segment, start=data.draw(st.sampled_from([segment.start, *segment.begins])))
        for segment in plan_segments(states, position, may_scratch=may_scratch)
    ]
    for segment in segments:
        run(hops, segment)
    lacking = {number for number, state in enumerate(states) if start_for(state, position) < position}
    for number, hop in enumerate(hops):
        assert hop.held[:position] == list(range(position))
        if may_scratch and number not in lacking:
            assert len(hop.held) == states[number].num_cached_tokens, "it lost nothing, and holds what it held"
    assert {segment.last for segment in segments} <= lacking
    computing = [
        (number, token)
        for segment in segments
        for number in segment.hops
        for token in range(segment.start, segment.end)
    ]
    assert len(computing) == len(set(computing)), "no hop computes a token twice"


@given(chains)
def test_where_outputs_are_kept_only_the_lost_hops_compute(chain: tuple[int, list[pb.Opened]]) -> None:
    position, states = chain
    whole = [
        holds(each.num_cached_tokens, each.min_position, 0, max(position, each.num_cached_tokens)) for each in states
    ]
    lacking = [number for number, state in enumerate(whole) if start_for(state, position) < position]
    segments = plan_segments(whole, position)
    assert sorted(number for segment in segments for number in segment.hops) == lacking
    assert not any(segment.scratch for segment in segments)


def test_two_lost_hops_get_their_own_lanes_and_neighbours_share_one() -> None:
    held = holds(8, 0, 0, 8)
    assert plan_segments([held, holds(0), held, holds(0), holds(3)], 8) == [
        ReplaySegment(0, 1, 1, 0, 8, frozenset()),
        ReplaySegment(2, 3, 4, 0, 8, frozenset()),
    ]


def test_hops_without_boundary_activations_compute_in_scratch_sessions() -> None:
    segments = plan_segments([holds(8), holds(0), holds(8), holds(2)], 8)
    assert segments == [ReplaySegment(CLIENT, 0, 3, 0, 8, frozenset({0, 2}))]
    assert segments[0].scratch_mask == 0b101
    (segment,) = plan_segments([holds(8), holds(5), holds(8), holds(2, 1)], 8)
    assert segment.scratch == {0, 2}
    assert segment.begins == range(1, 3), "the last hop holds two tokens"
    (segment,) = plan_segments([holds(8), holds(5), holds(8), holds(4, 3)], 8)
    assert segment.begins == range(3, 5)


@given(chains)
def test_hops_compute_nothing_of_what_the_one_before_the_lost_one_has_kept(chain: tuple[int, list[pb.Opened]]) -> None:
    position, states = chain
    whole = [
        holds(max(position, each.num_cached_tokens), 0, each.kept_start, each.num_cached_tokens) for each in states
    ]
    for each in whole:
        each.kept_end = max(position, each.kept_end)
    *helpers, kept = whole
    segments = plan_segments([*helpers, kept, holds(0)], position)
    computed = {segment.end for segment in segments if len(segment.hops) > 1 or segment.source == CLIENT}
    assert computed <= {min(kept.kept_start, position)}


def test_the_beginning_from_a_prefix_cache_is_computed_and_the_rest_sent_again() -> None:
    held = holds(8, 0, 3, 8)
    assert plan_segments([held, held, holds(1), holds(0)], 8) == [
        ReplaySegment(CLIENT, 0, 3, 0, 3, frozenset({0, 1})),
        ReplaySegment(1, 2, 3, 3, 8, frozenset()),
    ]
    (segment,) = plan_segments([held, held, holds(3)], 8)
    assert segment == ReplaySegment(1, 2, 2, 3, 8, frozenset()), "another session's beginning is there"
    # The hop before lacks tokens, too; or no hop has room for a scratch session, and would forget the rest.
    assert len(plan_segments([holds(0), held, holds(0)], 8)) == 1
    assert len(plan_segments([held, held, holds(0)], 8, may_scratch=False)) == 1
