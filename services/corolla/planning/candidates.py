"""Converts the messages of a placement to the planner's candidates, and planned hops back to messages. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, Final, NamedTuple

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
    servers = list(servers)
    measured = claimed_speeds(servers)
    return {
        each.server.server_id: _bound(measured[each.server.fingerprint], _claimed_speed(each), each.doubted)
        for each in servers
    }


def claimed_speeds(servers: Iterable[pb.PlacedServer]) -> dict[str, list[float]]:
    """Returns the speeds that servers have measured, sorted, by fingerprint."""
    return _measured((each.server.fingerprint, _claimed_speed(each)) for each in servers)


def speed_among(server: pb.ServerDescription, others: Sequence[float]) -> float:
    """Returns the speed that the planner would count of a server that joins others with these `claimed_speeds`."""
    return min(server.decode_tokens_per_second, MOST_TIMES_TYPICAL * _median_of_others(others, 0.0))


def _measured(speeds: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Returns the measured speeds, sorted, of all fingerprints that are named with a speed or with 0."""
    found: dict[str, list[float]] = {}
    for fingerprint, speed in speeds:
        group = found.setdefault(fingerprint, [])
        if speed:
            group.append(speed)
    for group in found.values():
        group.sort()
    return found


def _middle(measured: Sequence[float]) -> Sequence[float]:
    """Returns all of the sorted speeds that `_median_of_others` may return."""
    first, number = max(0, len(measured) // 2 - 1), len(measured)
    return [*measured[first : first + 2], *measured[(number - 1) // 2 : number][:1]]


def _bound(measured: Sequence[float], own: float, is_doubted: bool) -> float:
    return (1.0 if is_doubted else MOST_TIMES_TYPICAL) * _median_of_others(measured, own)


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


class _Said(NamedTuple):
    """What a ready server says of its speed.

    Attributes:
        kind: Its weights, and the numerics of its blocks; these are empty if they are not known.
        step_seconds: The time of a decode step in one block; 0: not known.
    """

    kind: tuple[str, str]
    is_doubted: bool
    speed: float
    step_seconds: float
    prompt_speed: float


class Candidates:
    """The ready servers of a placement, as plans see them. It follows the placement, and reads only what has changed.

    Args:
        fingerprint: Only servers with these weights are candidates; empty: any.
    """

    def __init__(self, fingerprint: str = "") -> None:
        self._fingerprint = fingerprint
        self._made: dict[str, Candidate] = {}
        # The weights and the speed of each server; what ready ones say; their times of a step and of a token of a
        # prompt in one block, as they say them and as plans count them.
        self._speeds: dict[str, tuple[str, float]] = {}
        self._said: dict[str, _Said] = {}
        self._own: dict[str, tuple[float, float]] = {}
        self._counted: dict[str, tuple[float, float]] = {}
        # What the times of one server depend on of others: typical speeds by weights, and typical times by kind.
        self._middles: dict[str, Sequence[float]] = {}
        self._typical: dict[tuple[str, str], tuple[float, float]] = {}

    def take(self, placed: Mapping[str, pb.PlacedServer], news: Collection[str]) -> dict[str, Candidate | None]:
        """Takes the next placement.

        Args:
            placed: All servers by id.
            news: The ids of those that are new or others than before.

        Returns:
            The candidates that are new or others than before, by id and without booked loads; None for those that are
            gone.
        """
        news = dict.fromkeys(news)
        self._read(placed, news)
        measured, stale = _measured(self._speeds.values()), news.keys()
        middles = {fingerprint: _middle(speeds) for fingerprint, speeds in measured.items()}
        if middles != self._middles:
            self._middles, stale = middles, self._said.keys()
        for server_id in stale:
            if (said := self._said.get(server_id)) is not None:
                self._own[server_id] = _seconds(said, measured[said.kind[0]])
        typical = self._typical_seconds()
        if typical != self._typical:
            self._typical, stale = typical, self._said.keys()
        changed: dict[str, Candidate | None] = dict.fromkeys(self._made.keys() - self._said.keys())
        for server_id in changed:
            del self._made[server_id], self._counted[server_id]
        for server_id in stale:
            if (said := self._said.get(server_id)) is None:
                continue
            own = self._own[server_id]
            step_s, prompt_s = map(_evened, own, typical.get(said.kind, own))
            # Servers that are about equal share sessions; else all planners would prefer the one that measured best.
            counted = steady(step_s), prompt_s
            if server_id in news or counted != self._counted[server_id]:
                self._counted[server_id] = counted
                candidate = _candidate(placed[server_id], *counted)
                if candidate != self._made.get(server_id):
                    self._made[server_id] = changed[server_id] = candidate
        return changed

    def _read(self, placed: Mapping[str, pb.PlacedServer], news: Mapping[str, None]) -> None:
        known: dict[str, Any]
        for known in (self._speeds, self._said, self._own):
            for server_id in (known.keys() - placed.keys()) | (known.keys() & news.keys()):
                del known[server_id]
        for server_id in news:
            each = placed[server_id]
            server, load, fingerprint = each.server, each.load, each.server.fingerprint
            speed = _claimed_speed(each)
            self._speeds[server_id] = fingerprint, speed
            if each.state == pb.SERVER_STATE_READY and self._fingerprint in ("", fingerprint):
                self._said[server_id] = _Said(
                    (fingerprint, load.numerics.partition("+")[0]), each.doubted, speed,
                    load.decode_step_seconds / len(Span.from_message(each.span)), server.prefill_tokens_per_second,
                )  # fmt: skip

    def _typical_seconds(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Returns the typical times of each kind whose numerics are known."""
        groups: dict[tuple[str, str], list[str]] = {}
        for server_id, said in self._said.items():
            groups.setdefault(said.kind, []).append(server_id)
        return {
            kind: (
                median_low([self._own[server_id][0] for server_id in alike]),
                median_low([self._own[server_id][1] for server_id in alike]),
            )
            for kind, alike in groups.items()
            if kind[1]
        }


def candidates(servers: Iterable[pb.PlacedServer], *, fingerprint: str = "") -> list[Candidate]:
    """Returns the ready servers with these weights (empty: with any), in the given order, without booked loads."""
    placed = {each.server.server_id: each for each in servers}
    return [each for each in Candidates(fingerprint).take(placed, placed).values() if each is not None]


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


def _seconds(said: _Said, measured: Sequence[float]) -> tuple[float, float]:
    """Returns the times that a decode step and a token of a prompt take in one block, as the server says them."""
    bound = _bound(measured, said.speed, said.is_doubted)
    if said.step_seconds > 0:
        step_s = max(said.step_seconds, 1 / bound)
    else:
        step_s = 1 / (min(said.speed, bound) or UNMEASURED_TOKENS_PER_SECOND)
    return step_s, 1 / (said.prompt_speed or _PROMPT_TIMES / step_s)


def _evened(own: float, typical: float) -> float:
    """Returns the time of servers of a server's kind, unless its own is far from that.

    Small differences between equal machines come from what the machines did while they measured, and say nothing about
    their next steps.
    """
    return typical if typical / _TIMES_ALIKE <= own <= typical * _TIMES_ALIKE else own


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
