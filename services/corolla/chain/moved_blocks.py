"""Which blocks of a session's chain another server computes than before. Pure."""

from dataclasses import dataclass

from corolla.v1 import common_pb2
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """A run of blocks that went from one server to another one; both by their ids."""

    blocks: Span
    lost: str
    found: str


def moved_blocks(before: common_pb2.Chain, after: common_pb2.Chain) -> tuple[MovedBlocks, ...]:
    """The longest runs that went from the same server to the same one, in order. Both chains cover the same blocks."""
    return tuple(
        MovedBlocks(Span(max(lost.span.start, found.span.start), end), lost.server_id, found.server_id)
        for lost in before.hops
        for found in after.hops
        if lost.server_id != found.server_id
        and max(lost.span.start, found.span.start) < (end := min(lost.span.end, found.span.end))
    )
