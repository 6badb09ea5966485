"""Follows the numerics of a chain's hops from one chain to the next one. Pure.

Servers of other numerics round in other ways. Where hops are replaced by such servers, tokens that follow may differ
from those of an undisturbed answer, unless all servers compute in float32.
"""

from collections.abc import Mapping

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.numerics import Numerics


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
    chain.mixes_numerics = before.mixes_numerics or after.mixes_numerics or _have_changed(known, chain)
    return chain


def numerics_of(chain: common_pb2.Chain, hop: common_pb2.Hop) -> Numerics:
    """Returns the numerics of a hop's server; empty ones if they are not known."""
    return Numerics.parse(chain.numerics.get(hop.server_id, ""))


def _have_changed(before: common_pb2.Chain, after: common_pb2.Chain) -> bool:
    """Some blocks went to another server, which is not known to compute alike."""
    for lost in before.hops:
        if lost in after.hops:
            continue
        for found in after.hops:
            overlap = max(lost.span.start, found.span.start) < min(lost.span.end, found.span.end)
            if overlap and lost.server_id != found.server_id:
                numerics = numerics_of(before, lost)
                if not numerics.blocks or not numerics.agrees_with(numerics_of(after, found)):
                    return True
    return False
