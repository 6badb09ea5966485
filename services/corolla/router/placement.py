"""Computes the throughput of each block, and the span with which a new server helps most. Pure.

Throughputs are whole micro-tokens per second. Their sums are exact, so equal spans compare equal in any order. Petals
(Borzunov et al., "Petals: Collaborative Inference and Fine-tuning of Large Models", 2023) has a similar rule: a new
server takes the blocks with the least throughput.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from corolla.chassis.errors import SpanRefused
from corolla.planning.candidates import UNMEASURED_TOKENS_PER_SECOND
from corolla.wire.span import Span

_MICRO: Final = 1_000_000
_MILLI: Final = 1_000


@dataclass(frozen=True, slots=True)
class HostedSpan:
    """The span of one server, and the server's speed.

    Attributes:
        span: The blocks that the server holds.
        speed: Tokens per second through one block; 0: not measured.
        head_blocks: The time of what follows the model's last block (final norm, head, draft model), as a number of
            blocks. It counts only in a span with the last block.
        kind: The server's kind; empty: not known, or the server is about to leave.
    """

    span: Span
    speed: float
    head_blocks: float = 0.0
    kind: str = ""

    def share(self, num_blocks: int) -> int:
        """Returns the throughput that the server gives each of its blocks, in micro-tokens per second."""
        return share_at(self.span, num_blocks, self.speed, self.head_blocks)


@dataclass(frozen=True, slots=True, order=True)
class WeightMemory:
    """A server's memory for weights, in units of one block's memory.

    Attributes:
        num_blocks: The whole memory.
        edge_blocks: The memory of the embedding, which is also that of the head.
        are_edges_tied: Whether a server that has both embedding and head stores one tensor for both.
        draft_blocks: The memory of the draft model, which the server with the last block holds.
    """

    num_blocks: float = math.inf
    edge_blocks: float = 0.0
    are_edges_tied: bool = False
    draft_blocks: float = 0.0

    def holds(self, span: Span, num_model_blocks: int) -> bool:
        """The span counts with embedding, head and draft model where it reaches the model's ends."""
        num_edges = (span.start == 0) + (span.end == num_model_blocks)
        if self.are_edges_tied:
            num_edges = min(num_edges, 1)
        num_more = num_edges * self.edge_blocks + (self.draft_blocks if span.end == num_model_blocks else 0.0)
        return len(span) + num_more <= self.num_blocks


ENOUGH: Final = WeightMemory()
"""Memory for any span."""


def throughput(servers: Iterable[HostedSpan], num_blocks: int) -> list[int]:
    """Returns the micro-tokens per second of each block. A server of k blocks gives each of them a k-th of its speed.

    The time of the head counts as `head_blocks` more blocks.
    """
    changes = [0] * (num_blocks + 1)
    for server in servers:
        share = server.share(num_blocks)
        changes[min(server.span.start, num_blocks)] += share
        changes[min(server.span.end, num_blocks)] -= share
    return list(accumulate(changes[:-1]))


def attainable(servers: Sequence[HostedSpan], num_blocks: int) -> int:
    """Returns the micro-tokens per second through all blocks if servers divide their time among them as is best.

    A chain may use a part of a span, so a server need not give each of its blocks as much. By Hall's theorem, the
    tokens per second are then the least, over all sets of blocks, of the speed of the servers that hold some of them,
    for each block of the set. Outside of a set lie gaps; its servers are all but those whose spans lie within a gap.
    Dinkelbach's method ("On nonlinear fractional programming", 1967) finds the least ratio: for the ratio of one set,
    dynamic programming over the ends of spans finds the set with the least surplus, until that is not negative.

    For example, of four blocks one server with the speed 1 holds all, and one with the speed 3 the first two. Divided
    evenly, the last two blocks would have 1/4 each. But the first server can leave the others alone: they have 1/2.

    The time of the head counts as so many more blocks at the model's end, the most of any server.
    """
    end = _MILLI * num_blocks + round(_MILLI * max((each.head_blocks for each in servers), default=0.0))
    held = [
        (_MILLI * each.span.start, end if each.span.end == num_blocks else _MILLI * each.span.end, _speed(each))
        for each in servers
    ]
    total = sum(speed for *_, speed in held)
    points = sorted({0, end, *(start for start, *_ in held), *(last for _, last, _ in held)})
    # The speed of all servers whose spans lie within a gap from one point to another one.
    inside = [
        [sum(speed for start, last, speed in held if first <= start and last <= final) for final in points]
        for first in points
    ]
    speed, length = total, end
    while True:
        # The best gaps up to each point: what they save, the speed within them, and their length.
        best = [(0, 0, 0)]
        for number, final in enumerate(points[1:], 1):
            gaps = (
                (
                    saved + length * inside[first][number] - speed * (final - points[first]),
                    within + inside[first][number],
                    skipped + final - points[first],
                )
                for first, (saved, within, skipped) in enumerate(best)
            )
            best.append(max(best[-1], *gaps))
        saved, within, skipped = best[-1]
        if length * total - speed * end >= saved:
            return speed * _MILLI // length
        speed, length = total - within, end - skipped


def choose_span(
    servers: Iterable[HostedSpan],
    num_blocks: int,
    capacity: int,
    speed: float,
    head_blocks: float = 0.0,
    memory: WeightMemory = ENOUGH,
    kind: str = "",
) -> Span:
    """Returns the span for a new server that leaves the fewest gaps, makes pairs, and raises the slowest block.

    Only a server that computes alike can stand by for another one without a change of tokens. So among candidates that
    cover equally many blocks, the one wins that gives most lone servers of the new server's kind a partner. A server is
    lone while no other one of its kind has all of its blocks.

    The others are compared by the sorted throughputs of all blocks: the higher minimum wins, then the fewer blocks at
    that minimum, and so on. Among equals, the candidate that leaves fewer gaps wins, then the lowest start. Servers
    that join one after another therefore cover the model as soon as their capacities add up to it.

    For example, servers of a fast kind A and a slow kind B hold 15 of 30 blocks each: one A has 0:15, one B 15:30. A
    second A takes 0:15, although 15:30 is slower: now the two stand by for each other. A third A finds no lone A, so it
    takes 15:30. It is lone there, until a fourth A joins it; a second B takes 15:30 as well.

    If memory is bounded, fewer blocks fit at the model's ends, so gaps of one length may need different numbers of
    servers. Then the first criterion is how many servers like the new one the remaining gaps need.

    Args:
        servers: The servers whose weights may be in one chain with the new server's, joining ones included.
        num_blocks: The number of blocks of the model, at least 1.
        capacity: The number of blocks that the server may hold, at least 1. If the model has fewer, it gets all.
        speed: The new server's tokens per second through one block.
        head_blocks: The time of final norm and head on this server, as a number of blocks. If capacities add up to
            more than the model, the server at the model's end therefore gets fewer blocks than fit.
        memory: The server's memory for weights, which the span must fit.
        kind: The server's kind; empty: not known, so that it has no partners.

    Raises:
        SpanRefused: The memory does not hold even one block anywhere in the model.
    """
    length = min(capacity, num_blocks)
    servers = tuple(servers)
    before, lone = throughput(servers, num_blocks), _lone_spans(servers, kind)
    num_starts = num_blocks if head_blocks or memory != ENOUGH else num_blocks - length + 1
    spans = [span for start in range(num_starts) if (span := _longest(start, length, num_blocks, memory)) is not None]
    if not spans:
        raise SpanRefused("the memory for weights holds no block, next to what lies at the model's ends")

    def rank(span: Span) -> tuple[int, int, int, list[int], int, int]:
        share = share_at(span, num_blocks, speed, head_blocks)
        after = list(before)
        for block in range(span.start, span.end):
            after[block] += share
        gaps = _gaps(after)
        num_needed = 0
        if memory != ENOUGH:
            num_needed = sum(_num_servers(gap, length, num_blocks, memory) for gap in gaps)
        num_paired = sum(span.covers(other) for other in lone)
        return -num_needed, -after.count(0), num_paired, sorted(after), -len(gaps), -span.start

    return max(spans, key=rank)


def longest_spans(num_blocks: int, capacity: int, memory: WeightMemory) -> list[Span]:
    """Returns the spans that a server can hold and that lie within no longer one that it can hold, by their starts."""
    found: list[Span] = []
    for start in range(num_blocks):
        span = _longest(start, capacity, num_blocks, memory)
        if span is not None and not (found and found[-1].covers(span)):
            found.append(span)
    return found


def _lone_spans(servers: Iterable[HostedSpan], kind: str) -> list[Span]:
    """Returns the spans of a kind's servers that no other server of the kind has as well."""
    counts = Counter(each.span for each in servers if kind and each.kind == kind)
    return [
        span
        for span, count in counts.items()
        if count == 1 and not any(other.covers(span) for other in counts if other != span)
    ]


def _num_servers(gap: Span, length: int, num_blocks: int, memory: WeightMemory) -> int:
    """Returns how many servers with this length and memory a gap needs; above `num_blocks` if they cannot fill it."""
    start, count = gap.start, 0
    while start < gap.end:
        part = _longest(start, min(length, gap.end - start), num_blocks, memory)
        if part is None:
            return num_blocks + 1
        start, count = part.end, count + 1
    return count


def _longest(start: int, length: int, num_blocks: int, memory: WeightMemory) -> Span | None:
    """Returns the longest span from `start` on that fits, with at most `length` blocks; None: none fits."""
    ends = range(min(start + int(min(length, memory.num_blocks)), num_blocks), start, -1)
    return next((span for end in ends if memory.holds(span := Span(start, end), num_blocks)), None)


def share_at(span: Span, num_blocks: int, speed: float, head_blocks: float) -> int:
    """Returns the micro-tokens per second that a server of this speed would give each block of a span."""
    num_held = len(span) + (head_blocks if span.end == num_blocks else 0.0)
    return max(1, round((speed or UNMEASURED_TOKENS_PER_SECOND) * _MICRO / num_held))


def _speed(server: HostedSpan) -> int:
    """Returns a server's speed through one block, in micro-tokens per second."""
    return max(1, round((server.speed or UNMEASURED_TOKENS_PER_SECOND) * _MICRO))


def _gaps(per_block: Sequence[int]) -> list[Span]:
    """Returns the longest runs of blocks without throughput, in order."""
    gaps, end = [], 0
    for is_held, run in groupby(per_block, bool):
        start, end = end, end + sum(1 for _ in run)
        if not is_held:
            gaps.append(Span(start, end))
    return gaps
