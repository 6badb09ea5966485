"""Chooses the server that stands by for one hop of a session. Pure."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from corolla.planning.candidates import has_room
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span


def standby_for(
    hop: common_pb2.Hop,
    placed: Mapping[str, pb.PlacedServer],
    excluded: Collection[str],
    *,
    fingerprint: str,
    num_tokens: int,
    num_placed: Mapping[str, int] = MappingProxyType({}),
) -> common_pb2.Hop | None:
    """Returns the best standby for a hop: a ready server with its blocks, its numerics and room; None without one.

    A server on another node comes first, then one in another zone, so that they rarely die together. Of these, the one
    comes first that stands by for the fewest sessions, and then the one with the most free pages. For example, a hop at
    10.0.0.1 in zone a has replicas at 10.0.0.1 (a), 10.0.0.2 (a) and 10.0.0.3 (b): the last one stands by for it.

    Args:
        placed: All servers by id.
        excluded: The ids of servers that must not be chosen: the session's hops, and servers that failed lately.
        fingerprint: The weights that the server must have.
        num_tokens: The number of tokens for which it needs pages, if it takes the session over.
        num_placed: For how many sessions servers stand by, as far as the caller knows, by id.
    """
    if (held := placed.get(hop.server_id)) is None:
        return None
    blocks, numerics = Span.from_message(hop.span), Numerics.parse(held.load.numerics)
    usable = [
        each
        for each in placed.values()
        if each.state == pb.SERVER_STATE_READY
        and not each.suspected
        and each.server.server_id not in excluded
        and each.server.server_id != hop.server_id
        and each.server.fingerprint == fingerprint
        and Span.from_message(each.span).covers(blocks)
        and numerics.agrees_with(Numerics.parse(each.load.numerics))
        and has_room(each.load, num_tokens)
    ]

    def rank(each: pb.PlacedServer) -> tuple[bool, bool, int, int, str]:
        return (
            node_of(each.server.address) == node_of(hop.address),
            each.server.zone == held.server.zone,
            num_placed.get(each.server.server_id, 0),
            -each.load.num_free_pages,
            each.server.server_id,
        )

    best = min(usable, key=rank, default=None)
    if best is None:
        return None
    return common_pb2.Hop(server_id=best.server.server_id, address=best.server.address, span=hop.span)


def node_of(address: str) -> str:
    """Returns the node of a server at this address: its host, as far as addresses tell."""
    return address.rpartition(":")[0]
