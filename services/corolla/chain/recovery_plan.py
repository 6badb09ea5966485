"""How hops that lack tokens of a session get them. Pure.

A hop needs, for each token that it lacks, what the hop before it once put out. That is kept there, or it is computed
again from further up: at the latest from the token log, which the client service has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

CLIENT: Final = -1
"""As the source of a lane: the client service, which has the token log, or the library with its hidden states."""


@dataclass(frozen=True, slots=True)
class HopState:
    """What one hop holds of a session.

    Attributes:
        num_held: tokens in its cache, from the first on.
        min_position: it can continue from any position from this one to `num_held`, or from the beginning: a sliding
            window has moved beyond what lies in between.
        kept_start: of the tokens `[kept_start, kept_end)` it has kept its outputs.
    """

    num_held: int
    min_position: int = 0
    kept_start: int = 0
    kept_end: int = 0

    def start_for(self, position: int) -> int:
        """From where it must process tokens again so that it holds those up to `position`; that itself: from nowhere.

        The highest position that it can continue from, at most `position`.
        """
        start = min(self.num_held, position)
        return start if start >= self.min_position else 0


@dataclass(frozen=True, slots=True)
class Lane:
    """One replay: the tokens `[start, position)` run through neighbouring hops, and end at one that lacks them.

    Attributes:
        source: the hop whose boundary activations go in, or `CLIENT`.
        first: the hop that they go into; `source + 1`.
        last: the hop where the lane ends.
        start: the first token.
        scratch: hops that lack nothing and only compute on the way, next to what they hold.
    """

    source: int
    first: int
    last: int
    start: int
    scratch: frozenset[int]

    @property
    def hops(self) -> range:
        return range(self.first, self.last + 1)

    @property
    def scratch_mask(self) -> int:
        """Bit `i` for the lane's `i`-th hop."""
        return sum(1 << (hop - self.first) for hop in self.scratch)


def plan_lanes(states: Sequence[HopState], position: int, *, may_scratch: bool = True) -> list[Lane]:
    """The lanes after which every hop holds `position` tokens, each from the nearest source. They are independent.

    Args:
        states: of the chain's hops, in order.
        position: of the session; what hops hold beyond does not count.
        may_scratch: whether hops may compute next to what they hold. Otherwise they compute their tokens anew in place.
    """
    lacks = [state.start_for(position) < position for state in states]
    lanes: list[Lane] = []
    for last, lacking in enumerate(lacks):
        if not lacking:
            continue
        lane = _nearest(states, lacks, last, position, may_scratch)
        # A longer lane passes through the hops of shorter ones before it and fills them, too.
        lanes = [each for each in lanes if each.last < lane.first]
        lanes.append(lane)
    return lanes


def _nearest(states: Sequence[HopState], lacks: Sequence[bool], last: int, position: int, may_scratch: bool) -> Lane:
    start = states[last].start_for(position)
    scratch: set[int] = set()
    for source in range(last - 1, CLIENT, -1):
        state = states[source]
        if not lacks[source] and state.kept_start <= start and state.kept_end >= position:
            return Lane(source, source + 1, last, start, frozenset(scratch))
        if lacks[source]:
            start = min(start, state.start_for(position))
            if any(start < states[hop].min_position for hop in range(source, last + 1) if lacks[hop]):
                start = 0
        else:
            # It begins at the first token, whether next to what it holds or in place.
            start = 0
            if may_scratch:
                scratch.add(source)
    return Lane(CLIENT, 0, last, start, frozenset(scratch))
