"""From the messages of a placement to what the planner reckons with, and back. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from corolla.planning.bookings import Booked
from corolla.planning.planner import Candidate, PlannedHop
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

UNMEASURED_TOKENS_PER_SECOND: Final = 1.0
"""Speed per block of a server that has not measured itself: little, but more than nothing."""

SESSION_LOAD: Final = 0.05
"""What an open session adds to a server's time per block, as a part of it: most of them are idle or batched."""

MOST_TIMES_TYPICAL: Final = 32.0
"""So many times the speed of others counts at most; devices of one pool may be 20 times as fast as others of it."""

SLOW_TIMES: Final = 8.0
"""A chain is far slower than its servers say where a token takes so many times as long as they make it."""

_SLOW_HOP_SECONDS: Final = 0.05
"""And so much more for each hop: links, batches and busy machines are in nobody's figures."""

_NOTHING: Final = Booked()


def counted_speed(placed: pb.PlacedServer, bound: float) -> float:
    """Tokens per second through one block: of late if known, else as measured at its start; 0: not measured.

    Args:
        bound: of `speed_bounds`.
    """
    return min(_claimed_speed(placed), bound)


def speed_bounds(servers: Iterable[pb.PlacedServer]) -> dict[str, float]:
    """How fast each server may count, by id: nobody but itself knows how fast it is, and it may lie.

    That is `MOST_TIMES_TYPICAL` times the median of what the others with its weights say, and that median alone where
    the server is doubted. Who is alone counts with what it says.
    """
    groups: dict[str, list[pb.PlacedServer]] = {}
    for each in servers:
        groups.setdefault(each.server.fingerprint, []).append(each)
    bounds: dict[str, float] = {}
    for group in groups.values():
        measured = sorted(speed for each in group if (speed := _claimed_speed(each)))
        for each in group:
            times = 1.0 if each.doubted else MOST_TIMES_TYPICAL
            bounds[each.server.server_id] = times * _median_of_others(measured, _claimed_speed(each))
    return bounds


def _claimed_speed(placed: pb.PlacedServer) -> float:
    return placed.load.decode_tokens_per_second or placed.server.decode_tokens_per_second


def _median_of_others(measured: Sequence[float], own: float) -> float:
    """Of sorted speeds without `own`, the lower one of two; infinite where there are none."""
    num_others = len(measured) - (own > 0)
    if num_others == 0:
        return math.inf
    middle = (num_others - 1) // 2
    return measured[middle + (0 < own <= measured[middle])]


def is_slow(servers: Collection[pb.PlacedServer], chain: common_pb2.Chain, token_seconds: float) -> bool:
    """Whether a chain's tokens come far more slowly than its servers make the planner believe.

    Args:
        token_seconds: from one token of a session to the next one.
    """
    hops = {hop.server_id: hop for hop in chain.hops}
    chosen = [each for each in candidates(servers, fingerprint=chain.fingerprint) if each.server_id in hops]
    if len(chosen) < len(hops):
        return False
    expected = sum(
        each.seconds_per_block * len(Span.of(hops[each.server_id].span)) + each.queue_seconds for each in chosen
    )
    return token_seconds > SLOW_TIMES * expected + _SLOW_HOP_SECONDS * len(hops)


def candidates(
    servers: Collection[pb.PlacedServer],
    *,
    fingerprint: str = "",
    num_tokens: int = 0,
    excluded: Collection[str] = (),
    booked: Mapping[str, Booked] | None = None,
) -> list[Candidate]:
    """The ready servers with these weights (empty: any), save the excluded ones, in the given order.

    Args:
        num_tokens: for which a server needs free pages; 0 asks for none.
        excluded: server ids.
        booked: what servers are to hold in addition to what they reported, by id.
    """
    bounds = speed_bounds(servers)
    return [
        _candidate(each, bounds[each.server.server_id], num_tokens, (booked or {}).get(each.server.server_id, _NOTHING))
        for each in servers
        if each.state == pb.SERVER_STATE_READY
        and fingerprint in ("", each.server.fingerprint)
        and each.server.server_id not in excluded
    ]


def has_room(load: pb.ServerLoad, num_tokens: int) -> bool:
    """Whether a server that said so has room for a session of so many tokens; one that says nothing may have."""
    return not load.HasField("max_session_tokens") or num_tokens <= load.max_session_tokens


def chain_of(hops: Iterable[PlannedHop], fingerprint: str) -> common_pb2.Chain:
    return common_pb2.Chain(
        fingerprint=fingerprint,
        hops=[
            common_pb2.Hop(server_id=hop.server.server_id, address=hop.server.address, span=hop.span.to_message())
            for hop in hops
        ],
    )


def _candidate(placed: pb.PlacedServer, bound: float, num_tokens: int, booked: Booked) -> Candidate:
    server, load, span = placed.server, placed.load, Span.of(placed.span)
    seconds_per_block = 1 / (counted_speed(placed, bound) or UNMEASURED_TOKENS_PER_SECOND)
    if load.decode_step_seconds > 0:
        seconds_per_block = max(load.decode_step_seconds / len(span), 1 / bound)
    return Candidate(
        server_id=server.server_id,
        address=server.address,
        fingerprint=server.fingerprint,
        span=span,
        seconds_per_block=seconds_per_block * (1 + SESSION_LOAD * (load.num_sessions + booked.num_sessions)),
        queue_seconds=load.num_queued_steps * seconds_per_block * len(span),
        zone=server.zone,
        has_pages=num_tokens == 0 or has_room(load, num_tokens + booked.num_tokens),
        is_suspected=placed.suspected,
    )
