"""Follows the numerics of a chain's hops from one chain to the next one. Pure.

Servers of other numerics round in other ways. Where hops are replaced by such servers, tokens that follow may differ
from those of an undisturbed answer, unless all servers compute in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span


def with_numerics(chain: common_pb2.Chain, placed: Mapping[str, pb.PlacedServer]) -> common_pb2.Chain:
    """Returns the chain with the numerics of its hops, as their servers announce them now, or else as it knows them.

    Args:
        placed: The servers of the placement by id.
    """
    named = common_pb2.Chain()
    named.CopyFrom(chain)
    named.ClearField("numerics")
    for hop in chain.hops:
        announced = placed[hop.server_id].load.numerics if hop.server_id in placed else ""
        if numerics := announced or chain.numerics.get(hop.server_id):
            named.numerics[hop.server_id] = numerics
    return named


def continued(
    before: common_pb2.Chain, after: common_pb2.Chain, placed: Mapping[str, pb.PlacedServer]
) -> common_pb2.Chain:
    """Returns the chain `after` of sessions that were on the chain `before`, with numerics and what became of them."""
    known, chain = with_numerics(before, placed), with_numerics(after, placed)
    moved = moved_blocks(known, chain)
    pairs = ((_parsed(known, each.lost), _parsed(chain, each.found)) for each in moved)
    # It counts as another way of computing if the former one is not known.
    have_changed = any(not own.blocks or not own.agrees_with(other) for own, other in pairs)
    chain.mixes_numerics = before.mixes_numerics or after.mixes_numerics or have_changed
    return chain


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """A run of blocks that went from the server with the id `lost` to the one with the id `found`."""

    blocks: Span
    lost: str
    found: str


def moved_blocks(before: common_pb2.Chain, after: common_pb2.Chain) -> tuple[MovedBlocks, ...]:
    """The runs of blocks that have moved from one server to another, in order, each as long as possible.

    Both chains must cover the same blocks.
    """
    return tuple(
        MovedBlocks(Span(max(lost.span.start, found.span.start), end), lost.server_id, found.server_id)
        for lost in before.hops
        if lost not in after.hops
        for found in after.hops
        if lost.server_id != found.server_id
        and max(lost.span.start, found.span.start) < (end := min(lost.span.end, found.span.end))
    )


def numerics_of(chain: common_pb2.Chain, hop: common_pb2.Hop) -> Numerics:
    """Returns the numerics of a hop's server; empty ones if they are not known."""
    return _parsed(chain, hop.server_id)


def _parsed(chain: common_pb2.Chain, server_id: str) -> Numerics:
    return Numerics.parse(chain.numerics.get(server_id, ""))
