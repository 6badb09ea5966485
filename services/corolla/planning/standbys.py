"""Chooses servers for the tokens of one hop: one that stands by for it, or one that holds a text already. Pure."""

from collections.abc import Collection, Iterable, Mapping
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
    if (own := placed.get(hop.server_id)) is None:
        return None

    def rank(each: pb.PlacedServer) -> tuple[bool, bool, int, int, str]:
        return (
            node_of(each.server.address) == node_of(hop.address),
            each.server.zone == own.server.zone,
            num_placed.get(each.server.server_id, 0),
            -each.load.num_free_pages,
            each.server.server_id,
        )

    usable = _alike(own, hop, placed.values(), excluded, fingerprint)
    best = min((each for each in usable if has_room(each.load, num_tokens)), key=rank, default=None)
    return None if best is None else _in_place_of(hop, best)


def holder_for(
    hop: common_pb2.Hop,
    placed: Mapping[str, pb.PlacedServer],
    excluded: Collection[str],
    held: Mapping[str, int],
    *,
    fingerprint: str,
) -> common_pb2.Hop | None:
    """Returns the server that holds most of a text as the hop would compute it; None if none holds more than the hop.

    Args:
        placed: All servers by id.
        excluded: The ids of servers that must not be chosen.
        held: How many of the text's first tokens servers may hold, by id.
        fingerprint: The weights that the server must have.
    """
    if (own := placed.get(hop.server_id)) is None:
        return None
    holding = [placed[server_id] for server_id in held if server_id in placed]
    usable = _alike(own, hop, holding, excluded, fingerprint)
    best = max(usable, key=lambda each: held[each.server.server_id], default=None)
    if best is None or held[best.server.server_id] <= held.get(hop.server_id, 0):
        return None
    return _in_place_of(hop, best)


def _alike(
    own: pb.PlacedServer,
    hop: common_pb2.Hop,
    servers: Iterable[pb.PlacedServer],
    excluded: Collection[str],
    fingerprint: str,
) -> list[pb.PlacedServer]:
    """Returns the other ready servers that have the hop's blocks and compute as its server does."""
    blocks, numerics = Span.from_message(hop.span), Numerics.parse(own.load.numerics)
    return [
        each
        for each in servers
        if each.state == pb.SERVER_STATE_READY
        and not each.suspected
        and each.server.server_id not in excluded
        and each.server.server_id != hop.server_id
        and each.server.fingerprint == fingerprint
        and Span.from_message(each.span).covers(blocks)
        and numerics.agrees_with(Numerics.parse(each.load.numerics))
    ]


def _in_place_of(hop: common_pb2.Hop, other: pb.PlacedServer) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=other.server.server_id, address=other.server.address, span=hop.span)


def node_of(address: str) -> str:
    """Returns the node of a server at this address: its host, as far as addresses tell."""
    return address.rpartition(":")[0]
