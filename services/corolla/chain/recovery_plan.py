"""Plans how hops that lack tokens of a session get them. Pure.

For each token that it lacks, a hop needs the output of the hop before it. That hop has kept the output, or computes it
again from the output of an earlier hop, or, in the last resort, from the token log of the client service.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.v1 import blocks_pb2 as pb

CLIENT: Final = -1
"""The source of a segment whose input comes from the token log of the client service or from the library's caller."""


def start_for(opened: pb.Opened, position: int) -> int:
    """The highest position up to `position` that a hop can continue from that has opened a session.

    It must process the tokens from there to `position` again; where the two are equal, it lacks nothing.
    """
    start = min(opened.num_cached_tokens, position)
    return start if start >= opened.min_position else 0


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """One replay: the tokens `[start, end)` run through neighbouring hops, the last of which lacks them.

    Attributes:
        source: the number of the hop whose boundary activations are the segment's input, or `CLIENT`.
        first: the hop that gets this input; `source + 1`.
        last: the hop where the segment ends.
        start: the first token.
        end: the token behind the last one.
        scratch: the hops that lack nothing. They compute in a scratch session, only to pass their outputs on.
        begins: where the replay may begin instead of at `start`, if the scratch sessions hold the tokens before.
    """

    source: int
    first: int
    last: int
    start: int
    end: int
    scratch: frozenset[int]
    begins: range = range(0)

    @property
    def hops(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def scratch_mask(self) -> int:
        """The scratch hops as bits: bit `i` stands for the segment's `i`-th hop."""
        return sum(1 << (hop - self.first) for hop in self.scratch)


def plan_segments(states: Sequence[pb.Opened], position: int, *, may_scratch: bool = True) -> list[ReplaySegment]:
    """Plans the segments after whose replay, one after another, every hop holds `position` tokens.

    Each segment begins at the nearest source. If that hop found the beginning of the text in its prefix cache, it has
    kept its outputs for the rest only. Then one segment computes the beginning, and the next one has the rest.

    Args:
        states: what the chain's hops answered when they opened the session, in order.
        position: the session's position; tokens that hops hold beyond it do not count.
        may_scratch: whether hops may compute in scratch sessions. Otherwise they compute their own session again.
    """
    lacks = [start_for(state, position) < position for state in states]
    segments: list[ReplaySegment] = []
    for last, lacking in enumerate(lacks):
        if not lacking:
            continue
        found = _nearest(states, lacks, last, position, may_scratch)
        # If a segment passes through the hops of earlier segments, it fills them, too, and replaces those segments.
        segments = [each for each in segments if each.last < found[0].first]
        segments += found
    return segments


def _nearest(
    states: Sequence[pb.Opened], lacks: Sequence[bool], last: int, end: int, may_scratch: bool
) -> list[ReplaySegment]:
    """The segments that give the hop `last` the tokens before `end`."""
    start = start_for(states[last], end)
    lacking, scratch = [states[last]], set[int]()
    for source in range(last - 1, CLIENT, -1):
        state = states[source]
        if not lacks[source] and state.kept_end >= end:
            if state.kept_start <= start:
                return [ReplaySegment(source, source + 1, last, start, end, frozenset(scratch))]
            # The beginning would fill hops before this one only in part, and a hop that computes in its own session
            # would forget the rest.
            if state.kept_start < end and may_scratch and not scratch and not any(lacks[:source]):
                beginning = _nearest(states, lacks, last, state.kept_start, may_scratch)
                return [*beginning, ReplaySegment(source, source + 1, last, state.kept_start, end, frozenset())]
        if lacks[source]:
            lacking.append(state)
            start = min(start, start_for(state, end))
            if any(start < states[hop].min_position for hop in range(source, last + 1) if lacks[hop]):
                start = 0
        else:
            # This hop lacks no tokens, but it has not kept all the outputs. To get them, it computes from the first
            # token on, either in a scratch session or in its own.
            start = 0
            if may_scratch:
                scratch.add(source)
    first_lacking = min(start_for(state, end) for state in lacking)
    first_begin = max(1, *(state.min_position for state in lacking))
    begins = range(first_begin, first_lacking + 1) if scratch else range(0)
    return [ReplaySegment(CLIENT, 0, last, start, end, frozenset(scratch), begins)]
