"""Finds the server that should move to another span, if any. Pure.

The algorithm is a breadth-first search (Cormen et al., "Introduction to Algorithms") over layouts, which begins at the
present layout; an edge is the move of one server. Spans keep their lengths; a server at the model's end also computes
the head. The search excludes moves that would take away a block's only server until the moved server is back. It
returns how good the best layout is that the other moves can reach, and the first move on a shortest way there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Final

from corolla.router.placement import ENOUGH, HostedSpan, WeightMemory, attainable, share_at, throughput
from corolla.wire.span import Span

MAX_LAYOUTS: Final = 4000
"""The search ends after so many layouts: small pools have fewer, and larger ones take some tenths of a second."""

FEW: Final = 8
"""So many servers are few: for more, it takes too long to find out how each would divide its time best."""

UNLIKE: Final = 1.25
"""The least ratio of the lengths of unlike servers."""

# The start of each movable server's span.
_Layout = tuple[int, ...]
# The index of a movable server, and the new start of its span.
_Step = tuple[int, int]
# Facts of a server: the length of its span; its throughput for each block if the span does not reach the model's end;
# the same if it does; its memory for weights.
_Facts = tuple[int, int, int, WeightMemory]
# The kind and the length of servers that could be partners.
_Group = tuple[str, int]
# The number of blocks with a server; the number of pairs that lone servers could make, negative; the throughput of the
# slowest block in micro-tokens per second; and the same with times that are divided evenly, which decides among equals.
_Worth = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A server, and whether the router may move it to another span of the same length that fits its memory.

    One that is not ready counts for throughput, since it will be ready soon. But no server may leave its blocks to it.
    """

    server_id: str
    hosted: HostedSpan
    is_movable: bool
    memory: WeightMemory = ENOUGH
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a server to `span`. If `covers`, it leads to fewer uncovered blocks, else to a pair or more speed."""

    server_id: str
    span: Span
    covers: bool


def next_move(
    members: Sequence[Member], num_blocks: int, *, min_gain: float, max_layouts: int = MAX_LAYOUTS
) -> Move | None:
    """Returns the first move on a shortest way to the best layout; None if that layout gains too little.

    Layouts are compared by the number of blocks with a server, then by the pairs that lone servers of one kind could
    still make, then by the throughput of the slowest block. A few servers of unlike lengths count as dividing their
    time among their blocks as is best (`placement.attainable`), and all others as dividing it evenly.
    A server is lone while no other one of its kind has the
    same span. For example, with one server of kind A and one of kind B on each of two spans, an A moves to the other A,
    and then a B to the other B.

    If nothing else changes, repeated moves come to an end, because each one comes closer to the best layout or finds a
    better one. To ensure this, only layouts that are at most two moves away count when there are too many to search
    them all. If too many are one move away, only moves count that make a pair or one of the slowest blocks faster.

    Args:
        members: The servers of one fingerprint.
        min_gain: The fraction by which the slowest block must become faster, unless the layout covers more blocks or
            makes a pair.
        max_layouts: The approximate number of layouts to search.
    """
    pool = Pool(members, num_blocks)
    goal, step = _search(pool, max_layouts)
    if step is None:
        return None
    present = pool.coverage(pool.layout).worth
    covers = goal[0] > present[0]
    if goal[:2] == present[:2] and goal[2] <= present[2] * (1 + min_gain):
        return None
    index, start = step
    member = pool.movable[index]
    return Move(member.server_id, Span(start, start + len(member.hosted.span)), covers)


class _Coverage:
    """What the servers of a layout give.

    Attributes:
        per_block: The throughput of each block.
        num_holders: The number of servers that hold each block.
        num_apart: The number of pairs that lone servers could make.
        worth: How good the layout is.
    """

    def __init__(
        self, per_block: list[int], num_holders: list[int], placed: Counter[tuple[_Group, int]], slowest: int
    ) -> None:
        self.per_block = per_block
        self.num_holders = num_holders
        self._placed = placed
        self._lone = Counter(group for (group, _), count in placed.items() if count == 1)
        self.num_apart = sum(count // 2 for count in self._lone.values())
        self.worth = _worth(per_block, self.num_apart, slowest)

    def num_apart_after(self, group: _Group, before: int, after: int) -> int:
        """Returns how many pairs lone servers could make once a server of this group has another start."""
        if not group[0]:
            return self.num_apart
        left, joined = self._placed[group, before], self._placed[group, after]
        num_lone = self._lone[group] + {1: -1, 2: 1}.get(left, 0) + {0: 1, 1: -1}.get(joined, 0)
        return self.num_apart + num_lone // 2 - self._lone[group] // 2


class Pool:
    """The servers, and the facts that are the same in all layouts."""

    def __init__(self, members: Sequence[Member], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        fixed = [each for each in members if not (each.is_movable and each.is_ready)]
        # Equal servers are neighbours in this order.
        self.movable = sorted(
            (each for each in members if each.is_movable and each.is_ready),
            key=lambda each: (each.hosted.kind, *_facts(each, num_blocks), each.server_id),
        )
        self.layout: _Layout = tuple(each.hosted.span.start for each in self.movable)
        self._facts = [_facts(each, num_blocks) for each in self.movable]
        self._fixed_spans = [each.hosted for each in fixed]
        self._are_few_and_unlike = are_few_and_unlike([each.hosted for each in members])
        self._throughput = throughput(self._fixed_spans, num_blocks)
        ready = [each.hosted.span for each in fixed if each.is_ready]
        self._num_holders = [sum(span.start <= block < span.end for span in ready) for block in range(num_blocks)]
        self._groups = [_group(each.hosted) for each in self.movable]
        self._fixed = Counter((_group(each.hosted), each.hosted.span.start) for each in fixed if each.hosted.kind)
        equals = groupby(range(len(self.movable)), key=lambda index: (self._groups[index], self._facts[index]))
        self._equals = [list(group) for _, group in equals]

    def coverage(self, layout: _Layout) -> _Coverage:
        per_block, num_holders = list(self._throughput), list(self._num_holders)
        for start, facts in zip(layout, self._facts, strict=True):
            share = self._share(facts, start)
            for block in range(start, start + facts[0]):
                per_block[block] += share
                num_holders[block] += 1
        placed = self._fixed + Counter(each for each in zip(self._groups, layout, strict=True) if each[0][0])
        return _Coverage(per_block, num_holders, placed, self._slowest(per_block, layout))

    def steps(self, layout: _Layout, num_holders: Sequence[int]) -> Iterator[_Step]:
        """Yields all moves that take away no block's only server; of equal servers, the first one moves."""
        seen = set()
        for index, (start, group, facts) in enumerate(zip(layout, self._groups, self._facts, strict=True)):
            length, *_, memory = facts
            if (start, group, facts) not in seen and min(num_holders[start : start + length]) > 1:
                seen.add((start, group, facts))
                for other in range(self.num_blocks - length + 1):
                    if other != start and memory.holds(Span(other, other + length), self.num_blocks):
                        yield index, other

    def helps(self, layout: _Layout, coverage: _Coverage, step: _Step) -> bool:
        """The move makes a pair, or one of the slowest blocks faster."""
        index, start = step
        if coverage.num_apart_after(self._groups[index], layout[index], start) < coverage.num_apart:
            return True
        return min(coverage.per_block[start : start + self._facts[index][0]]) == min(coverage.per_block)

    def worth_after(self, layout: _Layout, coverage: _Coverage, step: _Step) -> _Worth:
        index, start = step
        facts = self._facts[index]
        after = list(coverage.per_block)
        for block in range(layout[index], layout[index] + facts[0]):
            after[block] -= self._share(facts, layout[index])
        for block in range(start, start + facts[0]):
            after[block] += self._share(facts, start)
        slowest = self._slowest(after, (*layout[:index], start, *layout[index + 1 :]))
        return _worth(after, coverage.num_apart_after(self._groups[index], layout[index], start), slowest)

    def _slowest(self, per_block: list[int], layout: _Layout) -> int:
        """Returns the throughput of the slowest block of a layout, whose shares give each block `per_block`."""
        if not self._are_few_and_unlike or not min(per_block):
            return min(per_block)
        moved = [
            replace(each.hosted, span=Span(start, start + len(each.hosted.span)))
            for each, start in zip(self.movable, layout, strict=True)
        ]
        return attainable([*self._fixed_spans, *moved], self.num_blocks)

    def _share(self, facts: _Facts, start: int) -> int:
        length, within, at_end, _ = facts
        return at_end if start + length == self.num_blocks else within

    def key(self, layout: _Layout) -> _Layout:
        """Returns a key that is the same for layouts that differ only by an exchange of equal servers."""
        return tuple(start for group in self._equals for start in sorted(layout[index] for index in group))


def are_few_and_unlike(servers: Sequence[HostedSpan]) -> bool:
    """Whether a few servers hold unlike numbers of blocks, so that one of few blocks can relieve one of many."""
    lengths = [len(each.span) for each in servers]
    return 0 < len(servers) <= FEW and max(lengths) > UNLIKE * min(lengths)


def _facts(member: Member, num_blocks: int) -> _Facts:
    hosted = member.hosted
    length = len(hosted.span)
    # This is the share of a span that does not reach the model's end, wherever the span lies now.
    within = share_at(Span(0, length), num_blocks + 1, hosted.speed, hosted.head_blocks)
    at_end = share_at(Span(num_blocks - length, num_blocks), num_blocks, hosted.speed, hosted.head_blocks)
    return length, within, at_end, member.memory


def _group(hosted: HostedSpan) -> _Group:
    return hosted.kind, len(hosted.span)


def _worth(per_block: list[int], num_apart: int, slowest: int) -> _Worth:
    return len(per_block) - per_block.count(0), -num_apart, slowest, min(per_block)


def _search(pool: Pool, max_layouts: int) -> tuple[_Worth, _Step | None]:
    """Returns the best layout's worth, and the first step of a shortest way there; None: it is the present one."""
    coverage = pool.coverage(pool.layout)
    best: tuple[_Worth, _Step | None] = (coverage.worth, None)
    if len(list(islice(pool.steps(pool.layout, coverage.num_holders), max_layouts + 1))) > max_layouts:
        steps = pool.steps(pool.layout, coverage.num_holders)
        helpful = (step for step in steps if pool.helps(pool.layout, coverage, step))
        for step in islice(helpful, max_layouts):
            best = max(best, (pool.worth_after(pool.layout, coverage, step), step), key=lambda each: each[0])
        return best
    best_near = best
    seen = {pool.key(pool.layout)}
    frontier: list[tuple[_Layout, _Step | None]] = [(pool.layout, None)]
    depth = 0
    while frontier:
        depth += 1
        following: list[tuple[_Layout, _Step | None]] = []
        for layout, first in frontier:
            if depth > 1 and len(seen) >= max_layouts:
                return best_near
            coverage = pool.coverage(layout)
            for step in pool.steps(layout, coverage.num_holders):
                index, start = step
                other = (*layout[:index], start, *layout[index + 1 :])
                if (key := pool.key(other)) in seen:
                    continue
                seen.add(key)
                following.append((other, first or step))
                if (worth := pool.worth_after(layout, coverage, step)) > best[0]:
                    best = (worth, first or step)
                    if depth <= 2:
                        best_near = best
        frontier = following
    return best
