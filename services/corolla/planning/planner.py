"""The cheapest chain, by dynamic programming over the boundaries between blocks.

Pure. Since a hop's cost is linear in its number of blocks, some cheapest chain changes servers only where a server's
span starts or ends, so no other boundary is looked at. For the same reason the best block for a server to begin at does
not depend on where its hop ends, so at each boundary one figure for each server that holds it is enough: O(servers x
boundaries).
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.wire.span import Span, gaps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that may take part in a chain, with its costs in seconds per decoded token."""

    server_id: str
    address: str
    fingerprint: str
    span: Span
    seconds_per_block: float
    queue_seconds: float = 0.0
    zone: str = ""
    has_pages: bool = True
    is_suspected: bool = False


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What it costs to involve one more server, in seconds per token; both are above zero."""

    hop_seconds: float = 0.001
    other_zone_seconds: float = 0.002


@dataclass(frozen=True, slots=True)
class PlannedHop:
    server: Candidate
    span: Span


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """Hops that cover all blocks exactly once, in order; no server comes twice."""

    hops: tuple[PlannedHop, ...]
    fingerprint: str
    seconds: float


def plan(candidates: Iterable[Candidate], num_blocks: int, costs: LinkCosts | None = None) -> PlannedChain:
    """The chain with the least expected seconds per token, all of one fingerprint.

    Args:
        candidates: ready servers. Of equally cheap chains that one wins whose servers come first, so a caller that
            shuffles them spreads sessions over equal replicas.
        num_blocks: of the model.
        costs: of the links between servers.

    Raises:
        NoChain: some blocks have no server; metadata `uncovered_blocks` lists them as `start:end,start:end`.
        OutOfPages: every block has a server, but those with room do not make a chain.
    """
    return plan_blocks(candidates, Span(0, num_blocks), costs)


def plan_around_suspects(candidates: Sequence[Candidate], num_blocks: int) -> PlannedChain:
    """As `plan`, without suspected servers if there is a chain without them."""
    try:
        return plan([each for each in candidates if not each.is_suspected], num_blocks)
    except (NoChain, OutOfPages):
        return plan(candidates, num_blocks)


def plan_blocks(candidates: Iterable[Candidate], blocks: Span, costs: LinkCosts | None = None) -> PlannedChain:
    """As `plan`, for a part of the model: hops that cover just `blocks`."""
    by_fingerprint: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_fingerprint.setdefault(candidate.fingerprint, []).append(candidate)
    chains = [_cheapest(group, blocks, costs or LinkCosts()) for group in by_fingerprint.values()]
    found = [chain for chain in chains if chain is not None]
    if found:
        return min(found, key=lambda chain: chain.seconds)
    missing = least_uncovered(by_fingerprint.values(), blocks)
    if missing:
        listed = ",".join(map(str, missing))
        raise NoChain(f"no server holds blocks {listed}", metadata={"uncovered_blocks": listed})
    raise OutOfPages("no chain has enough free pages for the session")


def least_uncovered(groups: Iterable[Sequence[Candidate]], blocks: Span) -> list[Span]:
    """The blocks without a server in the group that lacks fewest; groups are of one fingerprint each."""
    missing = [gaps((each.span for each in group), blocks) for group in groups]
    return min(missing, key=lambda spans: sum(map(len, spans)), default=[blocks])


class _Route(NamedTuple):
    """To a boundary: by `server` from block `start` on, after `before`; the way to the first block has neither."""

    seconds: float
    server: Candidate | None = None
    start: int = 0
    before: "_Route | None" = None

    def hops(self, end: int) -> tuple[PlannedHop, ...]:
        """Of the whole way to the boundary `end`."""
        taken: list[PlannedHop] = []
        route: _Route | None = self
        while route is not None and route.server is not None:
            taken.append(PlannedHop(route.server, Span(route.start, end)))
            end, route = route.start, route.before
        return tuple(reversed(taken))


class _Ride:
    """The cheapest way to be on a server at the boundary that the planner has come to; infinite if there is none."""

    __slots__ = ("before", "entry_seconds", "index", "seconds", "seconds_per_block", "server", "start")

    def __init__(self, index: int, server: Candidate, costs: LinkCosts) -> None:
        self.index = index
        self.server = server
        self.seconds_per_block = server.seconds_per_block
        self.entry_seconds = costs.hop_seconds + server.queue_seconds
        self.seconds = math.inf
        self.start = 0
        self.before: _Route | None = None


def _cheapest(group: Sequence[Candidate], blocks: Span, costs: LinkCosts) -> PlannedChain | None:
    usable = [
        each for each in group if each.has_pages and each.span.start < blocks.end and blocks.start < each.span.end
    ]
    edges = {edge for each in usable for edge in (each.span.start, each.span.end) if blocks.start < edge < blocks.end}
    boundaries = [blocks.start, *sorted(edges), blocks.end]
    # The optimum, except that a long server may be left for a faster one inside it and taken again.
    hops = _all_at_once(usable, boundaries, costs)
    if len({hop.server.server_id for hop in hops}) < len(hops):
        # In order of where they end none can come twice, and wherever there is a chain there is one whose ends ascend.
        hops = _one_by_one(sorted(usable, key=lambda each: (each.span.end, each.span.start)), boundaries, costs)
    return PlannedChain(hops, group[0].fingerprint, _seconds(hops, costs)) if hops else None


def _all_at_once(servers: Sequence[Candidate], boundaries: Sequence[int], costs: LinkCosts) -> tuple[PlannedHop, ...]:
    """The cheapest hops, boundary by boundary, which may take a server twice; empty: there are none."""
    starting: defaultdict[int, list[_Ride]] = defaultdict(list)
    ending: defaultdict[int, list[_Ride]] = defaultdict(list)
    for index, server in enumerate(servers):
        ride = _Ride(index, server, costs)
        starting[max(server.span.start, boundaries[0])].append(ride)
        ending[server.span.end].append(ride)
    # By zone: the servers that hold the blocks behind a boundary in the given order, and the cheapest route to it.
    under_way: defaultdict[str, list[_Ride]] = defaultdict(list)
    arrivals: dict[str, _Route] = {}
    # The cheapest route of all zones, and its seconds with a change of zone after it; the first block is in no zone.
    cheapest: _Route | None = _Route(0.0)
    elsewhere = 0.0
    for here, boundary in pairwise(boundaries):
        for ride in starting[here]:
            insort(under_way[ride.server.zone], ride, key=lambda ride: ride.index)
        earlier, arrivals = arrivals, {}
        for rides in sorted(filter(None, under_way.values()), key=lambda rides: rides[0].index):
            zone = rides[0].server.zone
            before = earlier.get(zone)
            if before is not None and before.seconds <= elsewhere:
                best = _carried(rides, here, boundary, before.seconds, before)
            else:
                best = _carried(rides, here, boundary, elsewhere, cheapest)
            if best.before is not None:
                arrivals[zone] = _Route(best.seconds, best.server, best.start, best.before)
        cheapest = min(arrivals.values(), key=lambda route: route.seconds, default=None)
        elsewhere = math.inf if cheapest is None else cheapest.seconds + costs.other_zone_seconds
        for ride in ending[boundary]:
            under_way[ride.server.zone].remove(ride)
    return cheapest.hops(boundaries[-1]) if cheapest is not None else ()


def _carried(rides: Sequence[_Ride], here: int, boundary: int, seconds_here: float, before: _Route | None) -> _Ride:
    """Takes the rides of one zone from `here` to `boundary`; a ride begins `here` where that is cheaper than earlier.

    Args:
        seconds_here: of the route `before`, which a ride that begins `here` comes by.

    Returns:
        The cheapest ride; between equals the first one.
    """
    num_blocks = boundary - here
    best, best_seconds = rides[0], math.inf
    for ride in rides:
        seconds = ride.seconds
        begun_here = seconds_here + ride.entry_seconds
        if begun_here < seconds:
            seconds, ride.start, ride.before = begun_here, here, before
        ride.seconds = seconds = seconds + num_blocks * ride.seconds_per_block
        if seconds < best_seconds:
            best, best_seconds = ride, seconds
    return best


def _one_by_one(servers: Sequence[Candidate], boundaries: Sequence[int], costs: LinkCosts) -> tuple[PlannedHop, ...]:
    """The cheapest hops that take the servers in the given order; empty: there are none."""
    num_blocks_before = [0, *(end - start for start, end in pairwise(boundaries))]
    # By zone and boundary: the cheapest route whose last server is in the zone, and its seconds.
    routes: defaultdict[str, list[_Route | None]] = defaultdict(lambda: [None] * len(boundaries))
    seconds_in: defaultdict[str, list[float]] = defaultdict(lambda: [math.inf] * len(boundaries))
    # By boundary: the cheapest route of all zones, and its seconds with a change of zone after it.
    cheapest: list[_Route | None] = [_Route(0.0), *([None] * (len(boundaries) - 1))]
    elsewhere = [0.0, *([math.inf] * (len(boundaries) - 1))]
    for server in servers:
        own_routes, own_seconds = routes[server.zone], seconds_in[server.zone]
        seconds_per_block, entry_seconds = server.seconds_per_block, costs.hop_seconds + server.queue_seconds
        seconds, start, before = math.inf, 0, None
        first = bisect_left(boundaries, server.span.start)
        last = bisect_left(boundaries, min(server.span.end, boundaries[-1]))
        for index in range(first, last + 1):
            seconds += num_blocks_before[index] * seconds_per_block
            own = own_seconds[index]
            if seconds < own:
                own = own_seconds[index] = seconds
                own_routes[index] = route = _Route(seconds, server, start, before)
                known = cheapest[index]
                if known is None or seconds < known.seconds:
                    cheapest[index], elsewhere[index] = route, seconds + costs.other_zone_seconds
            if own <= elsewhere[index]:
                if own + entry_seconds < seconds:
                    seconds, start, before = own + entry_seconds, boundaries[index], own_routes[index]
            elif elsewhere[index] + entry_seconds < seconds:
                seconds, start, before = elsewhere[index] + entry_seconds, boundaries[index], cheapest[index]
    last_route = cheapest[-1]
    return last_route.hops(boundaries[-1]) if last_route is not None else ()


def _seconds(hops: Iterable[PlannedHop], costs: LinkCosts) -> float:
    """What a token costs on its way through these hops."""
    seconds, zone = 0.0, None
    for server, span in ((hop.server, hop.span) for hop in hops):
        link_seconds = costs.other_zone_seconds if zone is not None and zone != server.zone else 0.0
        own_seconds = costs.hop_seconds + server.queue_seconds + len(span) * server.seconds_per_block
        seconds, zone = seconds + own_seconds + link_seconds, server.zone
    return seconds
