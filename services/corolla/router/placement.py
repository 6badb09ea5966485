"""Who hosts what: the throughput of each block, and the span that a new server helps most with.

Pure. Throughputs are whole micro-tokens per second: their sums are exact, so equal spans compare equal in any order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.planning.candidates import UNMEASURED_TOKENS_PER_SECOND
from corolla.wire.span import Span

_MICRO: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class HostedSpan:
    """What one server holds.

    Attributes:
        speed: in tokens per second through one block; 0 means not measured.
        head_blocks: as many blocks take the time of final norm and head, where the span has the last block.
    """

    span: Span
    speed: float
    head_blocks: float = 0.0

    def share(self, num_blocks: int) -> int:
        """What it gives each of its blocks, in micro-tokens per second; the model has `num_blocks`."""
        return share_at(self.span, num_blocks, self.speed, self.head_blocks)


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
    servers: Iterable[HostedSpan], num_blocks: int, capacity: int, speed: float, head_blocks: float = 0.0
) -> Span:
    """The span that most raises the minimum throughput over all blocks.

    Candidates are compared by all blocks' throughputs from the least upwards: the higher minimum wins, then the fewer
    blocks at that minimum, and so on. Among equals, fewer gaps are left over, then the lowest start wins. Servers that
    join one after another therefore cover the model as soon as their capacities add up to it.

    Args:
        servers: those whose weights may stand in one chain with the new one's, joining ones included.
        num_blocks: of the model; at least 1.
        capacity: how many blocks fit; at least 1. A smaller model is taken whole.
        speed: the new server's, in tokens per second through one block.
        head_blocks: as many blocks take the time of final norm and head there. Where capacities add up to more than
            the model, the server at its end therefore takes fewer blocks than fit.
    """
    length = min(capacity, num_blocks)
    before = throughput(servers, num_blocks)
    num_starts = num_blocks if head_blocks else num_blocks - length + 1
    spans = [Span(start, min(start + length, num_blocks)) for start in range(num_starts)]

    def rank(span: Span) -> tuple[list[int], int, int]:
        share = share_at(span, num_blocks, speed, head_blocks)
        after = list(before)
        for block in range(span.start, span.end):
            after[block] += share
        return sorted(after), -len(_gaps(after)), -span.start

    return max(spans, key=rank)


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
