"""Who hosts what: the throughput of each block, and the span that a new server helps most with.

Pure. Throughputs are whole micro-tokens per second: their sums are exact, so equal spans compare equal in any order.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.chassis.errors import SpanRefused
from corolla.planning.candidates import UNMEASURED_TOKENS_PER_SECOND
from corolla.wire.span import Span

_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class HostedSpan:
    """What one server holds.

    Attributes:
        speed: in tokens per second through one block; 0 means not measured.
        head_blocks: as many blocks take the time of what comes behind the last one, where the span has that: final
            norm, head, draft model.
    """

    span: Span
    speed: float
    head_blocks: float = 0.0

    def share(self, num_blocks: int) -> int:
        """What it gives each of its blocks, in micro-tokens per second; the model has `num_blocks`."""
        return share_at(self.span, num_blocks, self.speed, self.head_blocks)


@dataclass(frozen=True, slots=True, order=True)
class WeightMemory:
    """A server's memory for weights, counted in blocks.

    Attributes:
        num_blocks: so many take all of it.
        edge_blocks: so many take that of the embedding, and so many that of the head.
        are_edges_tied: whether a server with both has them once.
        draft_blocks: so many take that of the draft model, which comes with the last block.
    """

    num_blocks: float = math.inf
    edge_blocks: float = 0.0
    are_edges_tied: bool = False
    draft_blocks: float = 0.0

    def holds(self, span: Span, num_model_blocks: int) -> bool:
        """Whether a span fits, with what lies at the model's ends."""
        num_edges = (span.start == 0) + (span.end == num_model_blocks)
        if self.are_edges_tied:
            num_edges = min(num_edges, 1)
        num_more = num_edges * self.edge_blocks + (self.draft_blocks if span.end == num_model_blocks else 0.0)
        return len(span) + num_more <= self.num_blocks


ENOUGH: Final = WeightMemory()
"""For any span."""


def throughput(servers: Iterable[HostedSpan], num_blocks: int) -> list[int]:
    """Micro-tokens per second of each block; a server of k blocks gives each of them a k-th of its speed.

    The head counts as blocks, too.
    """
    per_block = [0] * num_blocks
    for server in servers:
        share = server.share(num_blocks)
        for block in range(server.span.start, min(server.span.end, num_blocks)):
            per_block[block] += share
    return per_block


def uncovered(servers: Iterable[HostedSpan], num_blocks: int) -> list[Span]:
    """The longest runs of blocks that no server holds, in order."""
    return _gaps(throughput(servers, num_blocks))


def choose_span(
    servers: Iterable[HostedSpan],
    num_blocks: int,
    capacity: int,
    speed: float,
    head_blocks: float = 0.0,
    memory: WeightMemory = ENOUGH,
) -> Span:
    """The span that most raises the minimum throughput over all blocks.

    Candidates are compared by all blocks' throughputs from the least upwards: the higher minimum wins, then the fewer
    blocks at that minimum, and so on. Among equals, fewer gaps are left over, then the lowest start wins. Servers that
    join one after another therefore cover the model as soon as their capacities add up to it. Where memory is bounded,
    less fits at the model's ends, and gaps are not alike: first counts how many such servers those need that are left.

    Args:
        servers: those whose weights may stand in one chain with the new one's, joining ones included.
        num_blocks: of the model; at least 1.
        capacity: how many blocks fit; at least 1. A smaller model is taken whole.
        speed: the new server's, in tokens per second through one block.
        head_blocks: as many blocks take the time of final norm and head there. Where capacities add up to more than
            the model, the server at its end therefore takes fewer blocks than fit.
        memory: for weights; a span is as long as it holds.

    Raises:
        SpanRefused: there is no memory for a single block anywhere.
    """
    length = min(capacity, num_blocks)
    before = throughput(servers, num_blocks)
    num_starts = num_blocks if head_blocks or memory != ENOUGH else num_blocks - length + 1
    spans = [span for start in range(num_starts) if (span := _longest(start, length, num_blocks, memory)) is not None]
    if not spans:
        raise SpanRefused("the memory for weights holds no block, next to what lies at the model's ends")

    def rank(span: Span) -> tuple[int, list[int], int, int]:
        share = share_at(span, num_blocks, speed, head_blocks)
        after = list(before)
        for block in range(span.start, span.end):
            after[block] += share
        gaps = _gaps(after)
        num_needed = 0
        if memory != ENOUGH:
            num_needed = sum(_num_servers(gap, length, num_blocks, memory) for gap in gaps)
        return -num_needed, sorted(after), -len(gaps), -span.start

    return max(spans, key=rank)


def _num_servers(gap: Span, length: int, num_blocks: int, memory: WeightMemory) -> int:
    """How many such servers a gap needs; one that no server can begin to fill needs more than there are blocks."""
    start, count = gap.start, 0
    while start < gap.end:
        part = _longest(start, min(length, gap.end - start), num_blocks, memory)
        if part is None:
            return num_blocks + 1
        start, count = part.end, count + 1
    return count


def _longest(start: int, length: int, num_blocks: int, memory: WeightMemory) -> Span | None:
    """The longest span from `start` on that fits, of `length` at most."""
    ends = range(min(start + length, num_blocks), start, -1)
    return next((span for end in ends if memory.holds(span := Span(start, end), num_blocks)), None)


def share_at(span: Span, num_blocks: int, speed: float, head_blocks: float) -> int:
    """What a server of this speed would give each block of a span, in micro-tokens per second."""
    num_held = len(span) + (head_blocks if span.end == num_blocks else 0.0)
    return max(1, round((speed or UNMEASURED_TOKENS_PER_SECOND) * _MICRO / num_held))


def _gaps(per_block: Sequence[int]) -> list[Span]:
    gaps: list[Span] = []
    start: int | None = None
    for block, held in enumerate([*per_block, 1]):
        if held == 0 and start is None:
            start = block
        elif held and start is not None:
            gaps.append(Span(start, block))
            start = None
    return gaps
