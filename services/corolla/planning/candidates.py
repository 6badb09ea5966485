"""Converts the messages of a placement to the planner's candidates, and planned hops back to messages. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Final

from corolla.planning.planner import Candidate, PlannedHop
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span

UNMEASURED_TOKENS_PER_SECOND: Final = 1.0
"""The assumed tokens per second through one block of a server that has measured nothing: low, but above zero."""

SESSION_LOAD: Final = 0.05
"""The part by which an open session raises a server's time per block; small, as most sessions are idle or batched."""

MOST_TIMES_TYPICAL: Final = 32.0
"""A server's speed counts up to this many times the typical one; devices in one pool may differ by a factor of 20."""

_SPEED_STEP: Final = 1.05

_TIMES_ALIKE: Final = 2.0
"""Measured times of equal machines differ by up to this factor from the typical one, by what else these machines do."""

SLOW_TIMES: Final = 8.0
"""A chain is slow when a token takes more than this many times as long as its servers' figures predict, plus
`_SLOW_HOP_SECONDS` for each hop."""

_PROMPT_TIMES: Final = 8.0
"""How many times faster than single tokens those of a prompt are assumed to be, on a server that measured nothing."""

FETCHED_BYTES_PER_SECOND: Final = 250e6
"""The assumed speed at which keys and values come from another server, about that of a link of 2.5 Gbit/s."""

_SLOW_HOP_SECONDS: Final = 0.05
"""The time that a hop may take in addition, since no server's figures include links, batches and busy machines."""


def counted_speed(placed: pb.PlacedServer, bound: float) -> float:
    """Returns the tokens per second through one block that the planner counts; 0: the server has measured nothing.

    This is the recent speed that the server reports, or else the one that it measured at its start, up to `bound`.

    Args:
        bound: The server's entry in `speed_bounds`.
    """
    return min(_claimed_speed(placed), bound)


def steady(speed: float) -> float:
    """Rounds a speed to steps of 5 %, so that small differences between measurements do not count."""
    return _SPEED_STEP ** round(math.log(speed, _SPEED_STEP)) if speed > 0 else 0.0


def speed_bounds(servers: Iterable[pb.PlacedServer]) -> dict[str, float]:
    """Returns the greatest speed that the planner accepts of each server, by id, since a server may overstate its own.

    The bound is `MOST_TIMES_TYPICAL` times the median of what the other servers with the same weights report, or that
    median itself for a doubted server. If no other server has measured its speed, there is no bound.
    """
    groups: dict[str, list[tuple[pb.PlacedServer, float]]] = {}
    for each in servers:
        groups.setdefault(each.server.fingerprint, []).append((each, _claimed_speed(each)))
    bounds: dict[str, float] = {}
    for group in groups.values():
        measured = sorted(speed for _, speed in group if speed)
        for each, speed in group:
            times = 1.0 if each.doubted else MOST_TIMES_TYPICAL
            bounds[each.server.server_id] = times * _median_of_others(measured, speed)
    return bounds


def claimed_speeds(servers: Iterable[pb.PlacedServer], fingerprint: str) -> list[float]:
    """Returns the speeds that servers with these weights have measured, sorted."""
    alike = (each for each in servers if each.server.fingerprint == fingerprint)
    return sorted(speed for each in alike if (speed := _claimed_speed(each)))


def speed_among(server: pb.ServerDescription, others: Sequence[float]) -> float:
    """Returns the speed that the planner would count of a server that joins others with these `claimed_speeds`."""
    return min(server.decode_tokens_per_second, MOST_TIMES_TYPICAL * _median_of_others(others, 0.0))


def _claimed_speed(placed: pb.PlacedServer) -> float:
    return placed.load.decode_tokens_per_second or placed.server.decode_tokens_per_second


def _median_of_others(measured: Sequence[float], own: float) -> float:
    """Returns the median of the sorted speeds without `own` (the lower of two middle ones); infinite without others."""
    num_others = len(measured) - (own > 0)
    if num_others == 0:
        return math.inf
    middle = (num_others - 1) // 2
    return measured[middle + (0 < own <= measured[middle])]


def is_slow(ready: Mapping[str, Candidate], chain: common_pb2.Chain, token_seconds: float) -> bool:
    """A chain is slow if its tokens come far more slowly than its servers' figures predict.

    Args:
        ready: The ready servers by id.
        token_seconds: The time from one token of a session to the next one.
    """
    hops = {hop.server_id: hop for hop in chain.hops}
    chosen = [ready[server_id] for server_id in hops if server_id in ready]
    if len(chosen) < len(hops):
        return False
    expected = sum(
        each.seconds_per_block * len(Span.from_message(hops[each.server_id].span)) + each.queue_seconds
        for each in chosen
    )
    return token_seconds > SLOW_TIMES * expected + _SLOW_HOP_SECONDS * len(hops)


def candidates(servers: Collection[pb.PlacedServer], *, fingerprint: str = "") -> list[Candidate]:
    """Returns the ready servers with these weights (empty: with any), in the given order, without booked loads."""
    bounds = speed_bounds(servers)
    ready = [
        each for each in servers if each.state == pb.SERVER_STATE_READY and fingerprint in ("", each.server.fingerprint)
    ]
    steps = [_block_seconds(each, bounds[each.server.server_id]) for each in ready]
    prompts = [
        1 / (each.server.prefill_tokens_per_second or _PROMPT_TIMES / step_s)
        for each, step_s in zip(ready, steps, strict=True)
    ]
    evened = zip(ready, _evened(ready, steps), _evened(ready, prompts), strict=True)
    # Servers that are about equal share sessions; else all planners would prefer the one that measured best.
    return [_candidate(each, steady(step_s), prompt_s) for each, step_s, prompt_s in evened]


def by_fingerprint(servers: Collection[pb.PlacedServer]) -> Collection[list[Candidate]]:
    """Returns the ready servers in groups whose servers may be in one chain."""
    groups: dict[str, list[Candidate]] = {}
    for each in candidates(servers):
        groups.setdefault(each.fingerprint, []).append(each)
    return groups.values()


def chain_of(hops: Iterable[PlannedHop], fingerprint: str) -> common_pb2.Chain:
    return common_pb2.Chain(
        fingerprint=fingerprint,
        hops=[
            common_pb2.Hop(server_id=hop.server.server_id, address=hop.server.address, span=hop.span.to_message())
            for hop in hops
        ],
    )


def _block_seconds(placed: pb.PlacedServer, bound: float) -> float:
    """Returns the time that a decode step takes in one block, as the server says it."""
    if placed.load.decode_step_seconds > 0:
        return max(placed.load.decode_step_seconds / len(Span.from_message(placed.span)), 1 / bound)
    return 1 / (counted_speed(placed, bound) or UNMEASURED_TOKENS_PER_SECOND)


def _evened(servers: Sequence[pb.PlacedServer], seconds: Sequence[float]) -> list[float]:
    """Returns the times of servers; those with the same weights and numerics have one, unless theirs is far from it.

    Small differences between equal machines come from what the machines did while they measured, and say nothing about
    their next steps.
    """
    kinds = [(each.server.fingerprint, each.load.numerics.partition("+")[0]) for each in servers]
    groups: dict[tuple[str, str], list[float]] = {}
    for kind, each in zip(kinds, seconds, strict=True):
        groups.setdefault(kind, []).append(each)
    typical = {kind: median_low(group) for kind, group in groups.items() if kind[1]}
    return [
        usual if (usual := typical.get(kind, each)) / _TIMES_ALIKE <= each <= usual * _TIMES_ALIKE else each
        for kind, each in zip(kinds, seconds, strict=True)
    ]


def _candidate(placed: pb.PlacedServer, block_seconds: float, prompt_seconds: float) -> Candidate:
    server, load, span = placed.server, placed.load, Span.from_message(placed.span)
    return Candidate(
        server_id=server.server_id,
        address=server.address,
        fingerprint=server.fingerprint,
        span=span,
        seconds_per_block=block_seconds * (1 + SESSION_LOAD * load.num_sessions),
        queue_seconds=load.num_queued_steps * block_seconds * len(span),
        zone=server.zone,
        is_suspected=placed.suspected,
        numerics=Numerics.parse(load.numerics),
        session_seconds=block_seconds * SESSION_LOAD,
        prompt_seconds=prompt_seconds,
        fetch_seconds=server.cache_token_bytes / FETCHED_BYTES_PER_SECOND if server.cache_token_bytes else math.inf,
        room_tokens=load.max_session_tokens if load.HasField("max_session_tokens") else math.inf,
        node=server.node,
    )
