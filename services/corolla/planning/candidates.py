"""From the messages of a placement to what the planner reckons with, and back. Pure."""

from collections.abc import Collection, Iterable, Mapping
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

_NOTHING: Final = Booked()


def measured_speed(placed: pb.PlacedServer) -> float:
    """Tokens per second through one block: of late if known, else as measured at its start; 0: not measured."""
    return placed.load.decode_tokens_per_second or placed.server.decode_tokens_per_second


def candidates(
    servers: Iterable[pb.PlacedServer],
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
    return [
        _candidate(each, num_tokens, (booked or {}).get(each.server.server_id, _NOTHING))
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


def _candidate(placed: pb.PlacedServer, num_tokens: int, booked: Booked) -> Candidate:
    server, load, span = placed.server, placed.load, Span.of(placed.span)
    if load.decode_step_seconds > 0:
        seconds_per_block = load.decode_step_seconds / len(span)
    else:
        seconds_per_block = 1 / (measured_speed(placed) or UNMEASURED_TOKENS_PER_SECOND)
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
