"""Chooses servers for the tokens of one hop: one that stands by for it, or one that holds a text already. Pure."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from types import MappingProxyType

from corolla.planning.planner import Candidate
from corolla.v1 import common_pb2
from corolla.wire.span import Span


class Lack(StrEnum):
    """What a server lacks to stand by for another one, from the most to the least."""

    SERVER = "server"
    """It does not have all of its blocks."""
    NUMERICS = "numerics"
    """It computes in another way."""
    ROOM = "room"
    """It is full."""
    NODE = "node"
    """It would be lost with the node."""


def lack_of(server: Candidate, own: Candidate, blocks: Span, num_tokens: int) -> Lack | None:
    """Returns what a server lacks first to take over a session from another one; None: it lacks nothing.

    Args:
        own: The server that has the session.
        blocks: Those that the session uses there.
        num_tokens: The number of tokens for which it needs pages.
    """
    if server is own or server.is_suspected or server.fingerprint != own.fingerprint:
        return Lack.SERVER
    if not server.span.covers(blocks):
        return Lack.SERVER
    if not server.numerics.agrees_with(own.numerics):
        return Lack.NUMERICS
    if server.room_tokens < num_tokens:
        return Lack.ROOM
    return Lack.NODE if _node_of(server.address) == _node_of(own.address) else None


def standby_for(
    hop: common_pb2.Hop,
    ready: Mapping[str, Candidate],
    excluded: Collection[str],
    *,
    num_tokens: int,
    num_placed: Mapping[str, int] = MappingProxyType({}),
) -> common_pb2.Hop | None:
    """Returns the best standby for a hop: a server with its blocks, its numerics and room; None without one.

    A server on another node comes first, then one in another zone, so that they rarely die together. Of these, the one
    comes first that stands by for the fewest sessions, and then the one with the most room. For example, a hop at
    10.0.0.1 in zone a has replicas at 10.0.0.1 (a), 10.0.0.2 (a) and 10.0.0.3 (b): the last one stands by for it.

    Args:
        ready: The ready servers by id.
        excluded: The ids of servers that must not be chosen: the session's hops, and servers that failed lately.
        num_tokens: The number of tokens for which it needs pages, if it takes the session over.
        num_placed: For how many sessions servers stand by, as far as the caller knows, by id.
    """
    if (own := ready.get(hop.server_id)) is None:
        return None
    blocks = Span.from_message(hop.span)
    ranks = [
        (
            lack is Lack.NODE,
            each.zone == own.zone,
            num_placed.get(each.server_id, 0),
            -each.room_tokens,
            each.server_id,
        )
        for each in ready.values()
        if each.server_id not in excluded and (lack := lack_of(each, own, blocks, num_tokens)) in (None, Lack.NODE)
    ]
    return _in_place_of(hop, ready[min(ranks)[-1]]) if ranks else None


def holder_for(
    hop: common_pb2.Hop, ready: Mapping[str, Candidate], excluded: Collection[str], held: Mapping[str, int]
) -> common_pb2.Hop | None:
    """Returns the server that holds most of a text as the hop would compute it; None if none holds more than the hop.

    Args:
        ready: The ready servers by id.
        excluded: The ids of servers that must not be chosen.
        held: How many of the text's first tokens servers may hold, by id.
    """
    if (own := ready.get(hop.server_id)) is None:
        return None
    blocks = Span.from_message(hop.span)
    holding = [ready[server_id] for server_id in held if server_id in ready and server_id not in excluded]
    usable = [each for each in holding if lack_of(each, own, blocks, 0) in (None, Lack.NODE)]
    best = max(usable, key=lambda each: held[each.server_id], default=None)
    if best is None or held[best.server_id] <= held.get(hop.server_id, 0):
        return None
    return _in_place_of(hop, best)


def _in_place_of(hop: common_pb2.Hop, other: Candidate) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=other.server_id, address=other.address, span=hop.span)


def _node_of(address: str) -> str:
    """Returns the node of a server at this address: its host, as far as addresses tell."""
    return address.rpartition(":")[0]
