"""Chooses servers for the tokens of one hop: to stand by for it, to take it over, or to give it a text. Pure."""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from corolla.planning.planner import Candidate
from corolla.v1 import common_pb2
from corolla.wire.span import Span

_AMPLE_SESSIONS: Final = 16
"""Standbys with room for so many sessions count alike. Else all planners would choose the emptiest one."""


class Lack(StrEnum):
    """What a server lacks to go on with sessions of another one, from the most to the least."""

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
        own: The server that has the session. It lacks itself.
        blocks: Those that the session uses there.
        num_tokens: The number of tokens for which it needs pages.
    """
    if (lack := _lack_to_go_on(server, own, blocks)) is not None:
        return lack
    if server.room_tokens < num_tokens:
        return Lack.ROOM
    return Lack.NODE if _share_node(server, own) else None


def _lack_to_go_on(server: Candidate, own: Candidate, blocks: Span) -> Lack | None:
    """Returns what a server lacks to go on exactly where another one is, whatever its room and its node."""
    if server.server_id == own.server_id or server.is_suspected or server.fingerprint != own.fingerprint:
        return Lack.SERVER
    if not server.span.covers(blocks):
        return Lack.SERVER
    return None if server.numerics.agrees_with(own.numerics) else Lack.NUMERICS


def can_give(giver: Candidate, server: Candidate, blocks: Span) -> bool:
    """A server may take the keys and values of these blocks from another one that holds some of a text."""
    return _lack_to_go_on(giver, server, blocks) is None


def takers_for(
    servers: Iterable[Candidate],
    own: Candidate,
    blocks: Span,
    num_tokens: int,
    *,
    num_common: int = 0,
    holders: Collection[str] = (),
    is_guaranteed: bool = False,
) -> list[Candidate]:
    """Returns the servers that could take a session over from one that leaves, the best one first.

    Servers with room come before others, then those of the same numerics, those that hold the session's common pages,
    those on other nodes, and those with the most room. A server that has room only if it holds the common pages comes
    after all that have room: if it does not hold them, it refuses.

    Args:
        own: The server that leaves.
        num_tokens: The number of tokens for which the session needs pages.
        num_common: How many of them are in pages that it holds in common with others.
        holders: The ids of servers that are known to hold these pages.
        is_guaranteed: Whether the tenant has guaranteed pages, which servers do not count as free.
    """
    num_rest = max(1, num_tokens - num_common)
    usable = [
        each
        for each in servers
        if _lack_to_go_on(each, own, blocks) is not Lack.SERVER and (is_guaranteed or num_rest <= each.room_tokens)
    ]

    def rank(each: Candidate) -> tuple[bool, bool, bool, bool, float, str]:
        lack, is_holder = lack_of(each, own, blocks, 0), each.server_id in holders
        has_room = (num_rest if is_holder else num_tokens) <= each.room_tokens
        return (
            not has_room, lack is Lack.NUMERICS, not is_holder, lack is Lack.NODE, -each.room_tokens, each.server_id
        )  # fmt: skip

    return sorted(usable, key=rank)


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
    comes first that stands by for the fewest sessions, and then the one with the most room, where room for many such
    sessions counts alike. For example, a hop at 10.0.0.1 in zone a has replicas at 10.0.0.1 (a), 10.0.0.2 (a) and
    10.0.0.3 (b): the last one stands by for it.

    Args:
        ready: The ready servers by id. Of equal ones, the first is chosen.
        excluded: The ids of servers that must not be chosen: the session's hops, and servers that failed lately.
        num_tokens: The number of tokens for which it needs pages, if it takes the session over.
        num_placed: For how many sessions servers stand by, as far as the caller knows, by id.
    """
    if (own := ready.get(hop.server_id)) is None:
        return None
    blocks = Span.from_message(hop.span)
    usable = [
        (lack, each)
        for each in ready.values()
        if each.server_id not in excluded and (lack := lack_of(each, own, blocks, num_tokens)) in (None, Lack.NODE)
    ]

    def rank(found: tuple[Lack | None, Candidate]) -> tuple[bool, bool, int, float]:
        lack, each = found
        room_tokens = min(each.room_tokens, _AMPLE_SESSIONS * num_tokens)
        return lack is Lack.NODE, each.zone == own.zone, num_placed.get(each.server_id, 0), -room_tokens

    best = min(usable, key=rank, default=None)
    return None if best is None else _in_place_of(hop, best[1])


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
    usable = [each for each in holding if can_give(each, own, blocks)]
    best = max(usable, key=lambda each: held[each.server_id], default=None)
    if best is None or held[best.server_id] <= held.get(hop.server_id, 0):
        return None
    return _in_place_of(hop, best)


def _in_place_of(hop: common_pb2.Hop, other: Candidate) -> common_pb2.Hop:
    return common_pb2.Hop(server_id=other.server_id, address=other.address, span=hop.span)


def _share_node(one: Candidate, other: Candidate) -> bool:
    """Two servers name the same machine; if one of them names none, they have addresses of one host."""
    if one.node and other.node:
        return one.node == other.node
    return one.address.rpartition(":")[0] == other.address.rpartition(":")[0]
