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
    """What one server holds. `speed` is in tokens per second through one block; 0 means not measured."""

    span: Span
    speed: float

    @property
    def share(self) -> int:
        """What it gives each of its blocks, in micro-tokens per second."""
        return _share(self.speed, len(self.span))


def throughput(servers: Iterable[HostedSpan], num_blocks: int) -> list[int]:
    """Micro-tokens per second of each block; a server of k blocks gives each of them a k-th of its speed."""
    per_block = [0] * num_blocks
    for server in servers:
        for block in range(server.span.start, min(server.span.end, num_blocks)):
            per_block[block] += server.share
    return per_block


def uncovered(servers: Iterable[HostedSpan], num_blocks: int) -> list[Span]:
    """The longest runs of blocks that no server holds, in order."""
    return _gaps(throughput(servers, num_blocks))


def choose_span(servers: Iterable[HostedSpan], num_blocks: int, capacity: int, speed: float) -> Span:
    """The span that most raises the minimum throughput over all blocks.

    Candidates are compared by all blocks' throughputs from the least upwards: the higher minimum wins, then the fewer
    blocks at that minimum, and so on. Among equals, fewer gaps are left over, then the lowest start wins. Servers that
    join one after another therefore cover the model as soon as their capacities add up to it.

    Args:
        servers: those whose weights may stand in one chain with the new one's, joining ones included.
        num_blocks: of the model; at least 1.
        capacity: how many blocks fit; at least 1. A smaller model is taken whole.
        speed: the new server's, in tokens per second through one block.
    """
    length = min(capacity, num_blocks)
    share = _share(speed, length)
    before = throughput(servers, num_blocks)

    def rank(start: int) -> tuple[list[int], int, int]:
        after = [*before[:start], *(held + share for held in before[start : start + length]), *before[start + length :]]
        return sorted(after), -len(_gaps(after)), -start

    start = max(range(num_blocks - length + 1), key=rank)
    return Span(start, start + length)


def _share(speed: float, num_held_blocks: int) -> int:
    return max(1, round((speed or UNMEASURED_TOKENS_PER_SECOND) * _MICRO / num_held_blocks))


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
