"""Finds the server that should move to another span, if any. Pure.

The algorithm is a breadth-first search (Cormen et al., "Introduction to Algorithms") over layouts, which begins at the
present layout; an edge is the move of one server. It returns how good the best layout is that moves can reach, and the
first move on a shortest way there.

A server moves to the longest spans that it can hold, since a chain may use a part of a span. They have fewer blocks
where embedding or head need room, so a server shrinks or grows as it moves.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Final, NamedTuple

from corolla.router.placement import ENOUGH, HostedSpan, WeightMemory, attainable, longest_spans
from corolla.wire.span import Span, gaps

MAX_LAYOUTS: Final = 4000
"""The search ends after so many layouts: small pools have fewer, and larger ones take some tenths of a second."""

FEW: Final = 8
"""So many servers are few: for more, it takes too long to find out how each would divide its time best."""

UNLIKE: Final = 1.25
"""The least ratio of the lengths of unlike servers."""

# The number of blocks with a server; the number of pairs that lone servers could make, negative; the throughput of the
# slowest block in micro-tokens per second; and the same with times that are divided evenly, which decides among equals.
_Worth = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A server, and whether the router may move it to other spans, of up to `capacity` blocks, that fit its memory.

    One that is not ready counts for throughput, since it will be ready soon. But no server may leave its blocks to it.
    """

    server_id: str
    hosted: HostedSpan
    is_movable: bool
    capacity: int
    memory: WeightMemory = ENOUGH
    is_ready: bool = True

    @property
    def may_move(self) -> bool:
        return self.is_movable and self.is_ready

    def spans(self, num_blocks: int) -> Sequence[Span]:
        """Returns the spans that the server may hold later."""
        return longest_spans(num_blocks, self.capacity, self.memory) if self.may_move else [self.hosted.span]


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a server to `span`. If `covers`, it leads to fewer uncovered blocks, else to a pair or more speed."""

    server_id: str
    span: Span
    covers: bool


class _Place(NamedTuple):
    """Where a server is: which servers it is like but for their spans, as a number, and its span."""

    alike: int
    span: Span


class _Step(NamedTuple):
    """The move of one of the servers at a place to another span."""

    place: _Place
    span: Span


@dataclass(slots=True)
class _Layout:
    """Where the servers are, and what they give.

    Attributes:
        num_at: The number of servers that may move, by their places.
        num_placed: The number of all servers, by their kinds and spans.
        shares: How the throughput differs from block to block, from the first block on.
        holders: How the number of ready servers differs from block to block.
    """

    num_at: Counter[_Place]
    num_placed: Counter[tuple[str, Span]]
    shares: list[int]
    holders: list[int]

    def copy(self) -> "_Layout":
        return _Layout(Counter(self.num_at), Counter(self.num_placed), list(self.shares), list(self.holders))

    def put(self, hosted: HostedSpan, share: int, count: int, num_ready: int) -> None:
        """Adds `count` servers that give each of their blocks a share."""
        start, end = hosted.span.start, hosted.span.end
        self.num_placed[hosted.kind, hosted.span] += count
        self.shares[start] += count * share
        self.shares[end] -= count * share
        self.holders[start] += num_ready
        self.holders[end] -= num_ready

    def per_block(self) -> list[int]:
        """Returns the throughput of each block."""
        return list(accumulate(self.shares[:-1]))

    def num_apart(self) -> int:
        """Returns the number of pairs that lone servers could make."""
        num_lone = Counter(kind for (kind, _), count in self.num_placed.items() if kind and count == 1)
        return sum(count // 2 for count in num_lone.values())


class Interruptions:
    """Decides when servers may leave blocks that they alone hold: not soon after a loss, which may not last.

    A server that crashed or is replaced registers again before it reads its blocks. And a store that has lost its data
    names few servers for a while.

    Args:
        return_s: Within so many seconds, a lost server is expected to have registered again.
    """

    def __init__(self, return_s: float) -> None:
        self._return_s = return_s
        # When the servers of each model and fingerprint last held all blocks.
        self._whole_s: dict[tuple[str, str], float] = {}

    def look(self, model: str, groups: Mapping[str, Sequence[Member]], num_blocks: int, now_s: float) -> None:
        """Notes which servers of a model hold all blocks. Must be called often, with all that stay, by fingerprint."""
        self._whole_s = {key: whole_s for key, whole_s in self._whole_s.items() if now_s < whole_s + self._return_s}
        for fingerprint, members in groups.items():
            if not gaps((each.hosted.span for each in members), Span(0, num_blocks)):
                self._whole_s[model, fingerprint] = now_s

    def saw_nothing(self, now_s: float) -> None:
        """Notes that the store did not answer: servers may have been lost, and may return, until now."""
        self._whole_s = dict.fromkeys(self._whole_s, now_s)

    def may_begin(self, model: str, fingerprint: str, now_s: float) -> bool:
        return now_s >= self._whole_s.get((model, fingerprint), -math.inf) + self._return_s


def next_move(
    members: Sequence[Member],
    num_blocks: int,
    *,
    min_gain: float,
    max_layouts: int = MAX_LAYOUTS,
    may_interrupt: bool = True,
) -> Move | None:
    """Returns the first move on a shortest way to the best layout; None if that layout gains too little.

    Layouts are compared by the number of blocks with a server, then by the pairs that lone servers of one kind could
    still make, then by the throughput of the slowest block. A few servers of unlike lengths count as dividing their
    time among their blocks as is best (`placement.attainable`), and all others as dividing it evenly. A server is lone
    while no other one of its kind has the same span. For example, with one server of kind A and one of kind B on each
    of two spans, an A moves to the other A, and then a B to the other B.

    No server leaves blocks that it alone holds, unless blocks without a server keep all answers from going on anyway,
    other moves do not change that, and all blocks have a server in the end. For example, of five blocks a holds 1:4,
    b 0:2, and c, which has no room for the head, 2:3. If a has room for the head and two blocks, it moves to 3:5.

    If nothing else changes, repeated moves come to an end, because each one comes closer to the best layout or finds a
    better one. To ensure this, only layouts that are at most two moves away count when there are too many to search
    them all. If too many are one move away, only moves count that make a pair or one of the slowest blocks faster.

    Args:
        members: The servers of one fingerprint.
        min_gain: The fraction by which the slowest block must become faster, unless the layout covers more blocks or
            makes a pair.
        max_layouts: The approximate number of layouts to search.
        may_interrupt: Whether a server may leave blocks that it alone holds; see `Interruptions`.
    """
    pool = Pool(members, num_blocks)
    present = pool.worth(pool.layout)
    goal, step = _search(pool, max_layouts, may_interrupt=False)
    if goal[0] < num_blocks and may_interrupt:
        whole, first = _search(pool, max_layouts, may_interrupt=True)
        if whole[0] == num_blocks:
            goal, step = whole, first
    if step is None or (goal[:2] == present[:2] and goal[2] <= present[2] * (1 + min_gain)):
        return None
    return Move(pool.first_at[step.place], step.span, covers=goal[0] > present[0])


class Pool:
    """The servers, and the facts that are the same in all layouts.

    Attributes:
        layout: The present one.
        first_at: The id of one of the servers at each place of the present layout.
    """

    def __init__(self, members: Sequence[Member], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layout = _Layout(Counter(), Counter(), [0] * (num_blocks + 1), [0] * (num_blocks + 1))
        self.first_at: dict[_Place, str] = {}
        # One of the servers that are alike, and the spans to which they may move; by the number of these servers.
        self._alike: list[HostedSpan] = []
        self._spans: list[Sequence[Span]] = []
        self._fixed: list[HostedSpan] = []
        self._known: dict[_Place, tuple[HostedSpan, int]] = {}
        self._are_few_and_unlike = are_few_and_unlike(members, num_blocks)
        numbers: dict[tuple[HostedSpan, int, WeightMemory], int] = {}
        for each in sorted(members, key=lambda each: (each.hosted.kind, each.hosted.span, each.server_id)):
            if not each.may_move:
                self._fixed.append(each.hosted)
                self.layout.put(each.hosted, each.hosted.share(num_blocks), 1, int(each.is_ready))
                continue
            facts = replace(each.hosted, span=Span(0, 1)), each.capacity, each.memory
            place = _Place(numbers.setdefault(facts, len(numbers)), each.hosted.span)
            if place.alike == len(self._alike):
                self._alike.append(each.hosted)
                self._spans.append(each.spans(num_blocks))
            self._put(self.layout, place, 1)
            self.first_at.setdefault(place, each.server_id)

    def worth(self, layout: _Layout) -> _Worth:
        per_block = layout.per_block()
        slowest = min(per_block)
        if not self._are_few_and_unlike or not slowest:
            return self.num_blocks - per_block.count(0), -layout.num_apart(), slowest, slowest
        moved = [self._at(place)[0] for place, count in layout.num_at.items() for _ in range(count)]
        best = attainable([*self._fixed, *moved], self.num_blocks)
        return self.num_blocks, -layout.num_apart(), best, slowest

    def steps(self, layout: _Layout, *, may_interrupt: bool) -> Iterator[_Step]:
        """Yields the moves of a layout.

        Args:
            may_interrupt: Whether servers may leave blocks that they alone hold while other blocks have no server.
        """
        num_holders = list(accumulate(layout.holders[:-1]))
        may_leave = may_interrupt and not min(layout.per_block())
        for place in layout.num_at:
            if may_leave or min(num_holders[place.span.start : place.span.end]) > 1:
                yield from (_Step(place, span) for span in self._spans[place.alike] if span != place.span)

    def helps(self, layout: _Layout, step: _Step) -> bool:
        """The move makes a pair, or one of the slowest blocks faster."""
        kind, per_block = self._alike[step.place.alike].kind, layout.per_block()
        makes_pair = bool(kind) and layout.num_placed[kind, step.span] == 1
        return makes_pair or min(per_block[step.span.start : step.span.end]) == min(per_block)

    def after(self, layout: _Layout, step: _Step) -> _Layout:
        after = layout.copy()
        self._put(after, step.place, -1)
        self._put(after, _Place(step.place.alike, step.span), 1)
        return after

    def _put(self, layout: _Layout, place: _Place, count: int) -> None:
        layout.put(*self._at(place), count, count)
        layout.num_at[place] += count
        if not layout.num_at[place]:
            del layout.num_at[place]

    def _at(self, place: _Place) -> tuple[HostedSpan, int]:
        """Returns a server at a place, and the throughput that it gives each of its blocks."""
        if place not in self._known:
            hosted = replace(self._alike[place.alike], span=place.span)
            self._known[place] = hosted, hosted.share(self.num_blocks)
        return self._known[place]


def are_few_and_unlike(members: Sequence[Member], num_blocks: int) -> bool:
    """Whether a few servers may hold unlike numbers of blocks, so that one of few blocks can relieve one of many."""
    if len(members) > FEW:
        return False
    lengths = [len(span) for each in members for span in each.spans(num_blocks)]
    return max(lengths, default=0) > UNLIKE * min(lengths, default=0)


def _search(pool: Pool, max_layouts: int, *, may_interrupt: bool) -> tuple[_Worth, _Step | None]:
    """Returns the best layout's worth, and the first step of a shortest way there; None: it is the present one."""
    best: tuple[_Worth, _Step | None] = (pool.worth(pool.layout), None)
    if len(list(islice(pool.steps(pool.layout, may_interrupt=may_interrupt), max_layouts + 1))) > max_layouts:
        steps = pool.steps(pool.layout, may_interrupt=may_interrupt)
        for step in islice((step for step in steps if pool.helps(pool.layout, step)), max_layouts):
            best = max(best, (pool.worth(pool.after(pool.layout, step)), step), key=lambda each: each[0])
        return best
    best_near = best
    seen = {frozenset(pool.layout.num_at.items())}
    waiting = deque([(pool.layout, best[1], 1)])
    while waiting:
        layout, first, depth = waiting.popleft()
        if depth > 1 and len(seen) >= max_layouts:
            return best_near
        for step in pool.steps(layout, may_interrupt=may_interrupt):
            after = pool.after(layout, step)
            if (key := frozenset(after.num_at.items())) in seen:
                continue
            seen.add(key)
            waiting.append((after, first or step, depth + 1))
            if (worth := pool.worth(after)) > best[0]:
                best = (worth, first or step)
                if depth <= 2:
                    best_near = best
    return best
