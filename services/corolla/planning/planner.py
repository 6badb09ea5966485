"""Plans the cheapest chain by dynamic programming over the boundaries between blocks. Pure.

The algorithm is the shortest path in a directed acyclic graph (Cormen et al., "Introduction to Algorithms"). Each node
is a server at a boundary. The cost of a hop is linear in its number of blocks. Therefore some cheapest chain changes
servers only where a server's span starts or ends, and the planner looks at no other boundary. For the same reason, the
best block for a server to begin at does not depend on where its hop ends: at each boundary, the planner keeps one
figure for each server that holds the blocks there. The time is O(servers x boundaries).

An example with 8 blocks, where a hop costs 1 ms and a change of zone 2 ms (test_planner.py runs it):

    server       a1    a2    b1    b2    c     d
    blocks       0:4   4:8   0:4   4:8   2:6   0:8
    ms per block 10    10    8     12    4     20
    zone         A     A     B     B     A     A

The boundaries are 0, 2, 4, 6 and 8. At 2, b1 has cost 1 + 2 * 8 = 17 ms and a1 21 ms. Server c begins at 2 after b1,
because 17 + 2 for the change of zone is less than 21: at 6 it has cost 19 + 1 + 4 * 4 = 36 ms. There a2 takes over in
the same zone: at 8 it has cost 36 + 1 + 2 * 10 = 57 ms, b2 36 + 2 + 1 + 2 * 12 = 63 ms. The cheapest chain is
b1 0:2, c 2:6, a2 6:8 with 57 ms per token. The chain a1, a2 would cost 82 ms, and d alone 161 ms.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.wire.numerics import UNKNOWN, Numerics
from corolla.wire.span import Span, gaps

HOP_SECONDS: Final = 0.001
"""What one more server in a chain costs, in seconds per token."""
OTHER_ZONE_SECONDS: Final = 0.002
"""What a link between two zones costs in addition."""
FETCH_START_SECONDS: Final = 0.1
"""What a fetch costs next to the transfer, so that a hop computes what takes less time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A server that may be part of a chain, with its costs in seconds per decoded token.

    Attributes:
        session_seconds: By how much one more session raises `seconds_per_block`.
        prompt_seconds: The time for one token of a prompt in one block.
        fetch_seconds: The time for one token in one block that comes from another server instead; infinite: unknown.
        room_tokens: The most tokens of a session for which the server has free pages.
        has_pages: Whether that is enough for the session for which a chain is planned.
        node: The name of the server's machine; empty: the host of its address.
    """

    server_id: str
    address: str
    fingerprint: str
    span: Span
    seconds_per_block: float
    queue_seconds: float = 0.0
    zone: str = ""
    has_pages: bool = True
    is_suspected: bool = False
    numerics: Numerics = UNKNOWN
    session_seconds: float = 0.0
    prompt_seconds: float = 0.0
    fetch_seconds: float = math.inf
    room_tokens: float = math.inf
    node: str = ""

    def computing_seconds(self, num_tokens: int, num_blocks: int) -> float:
        """Returns how long the server computes so many tokens of a prompt."""
        return num_tokens * num_blocks * self.prompt_seconds if num_tokens else 0.0

    def fetching_seconds(self, num_tokens: int, num_blocks: int) -> float:
        """Returns how long it takes to fetch so many tokens from another server that holds them."""
        return FETCH_START_SECONDS + num_tokens * num_blocks * self.fetch_seconds if num_tokens else 0.0


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


def plan(candidates: Iterable[Candidate], num_blocks: int) -> PlannedChain:
    """Returns the chain with the least expected seconds per token; its servers have one fingerprint.

    Args:
        candidates: The ready servers. Among equally cheap chains, the one whose servers come first wins, so a caller
            that shuffles them spreads sessions over equal replicas.

    Raises:
        NoChain: Some blocks have no server; metadata `uncovered_blocks` lists them as `start:end,start:end`.
        OutOfPages: Every block has a server, but the servers with room do not form a chain.
    """
    return plan_blocks(candidates, Span(0, num_blocks))


def plan_around_suspects(candidates: Sequence[Candidate], num_blocks: int) -> PlannedChain:
    """Plans like `plan`, but without suspected servers if a chain without them exists."""
    try:
        return plan([each for each in candidates if not each.is_suspected], num_blocks)
    except (NoChain, OutOfPages):
        return plan(candidates, num_blocks)


def plan_blocks(candidates: Iterable[Candidate], blocks: Span) -> PlannedChain:
    """Plans like `plan`, but for a part of the model: the hops cover just `blocks`."""
    by_fingerprint: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_fingerprint.setdefault(candidate.fingerprint, []).append(candidate)
    chains = [_cheapest(group, blocks) for group in by_fingerprint.values()]
    found = [chain for chain in chains if chain is not None]
    if found:
        return min(found, key=lambda chain: chain.seconds)
    missing = least_uncovered(([each.span for each in group] for group in by_fingerprint.values()), blocks)
    if missing:
        listed = ",".join(map(str, missing))
        raise NoChain(f"no server holds blocks {listed}", metadata={"uncovered_blocks": listed})
    raise OutOfPages("no chain has enough free pages for the session")


def plan_replacements(candidates: Sequence[Candidate], lost: Sequence[tuple[Span, Numerics]]) -> PlannedChain:
    """Plans hops for the blocks of neighbouring lost hops; servers that compute as the lost ones did come before cost.

    Args:
        candidates: The ready servers, as for `plan`.
        lost: The blocks and the numerics of each lost hop, in order. Only if some blocks have no candidate of the same
            numerics, any candidate may hold the blocks.

    Raises:
        NoChain, OutOfPages: See `plan`.
    """
    hops: list[PlannedHop] = []
    try:
        for numerics, run in groupby(lost, key=lambda each: each[1]):
            spans = [span for span, _ in run]
            taken = {hop.server.server_id for hop in hops}
            alike = [each for each in candidates if each.numerics.agrees_with(numerics) and each.server_id not in taken]
            hops.extend(plan_blocks(alike, Span(spans[0].start, spans[-1].end)).hops)
    except (NoChain, OutOfPages):
        return plan_blocks(candidates, Span(lost[0][0].start, lost[-1][0].end))
    return PlannedChain(tuple(hops), hops[0].server.fingerprint, _seconds(hops))


def least_uncovered(groups: Iterable[Iterable[Span]], blocks: Span) -> list[Span]:
    """Returns the blocks that no span of a group has, for the group that lacks the fewest."""
    missing = [gaps(spans, blocks) for spans in groups]
    return min(missing, key=lambda spans: sum(map(len, spans)), default=[blocks])


class _Route(NamedTuple):
    """A route to a boundary: `server` computes the blocks from `start`, after the route `before`.

    The empty route, which every route begins with, has neither a server nor a route before it.
    """

    seconds: float
    server: Candidate | None = None
    start: int = 0
    before: "_Route | None" = None

    def hops(self, end: int) -> tuple[PlannedHop, ...]:
        """Returns the hops of the whole route, which ends at the boundary `end`."""
        taken: list[PlannedHop] = []
        route: _Route | None = self
        while route is not None and route.server is not None:
            taken.append(PlannedHop(route.server, Span(route.start, end)))
            end, route = route.start, route.before
        return tuple(reversed(taken))


class _RouteOnServer:
    """The cheapest route that ends on a server at the planner's current boundary; `seconds` is infinite without one."""

    __slots__ = ("before", "entry_seconds", "index", "seconds", "seconds_per_block", "server", "start")

    def __init__(self, index: int, server: Candidate) -> None:
        self.index = index
        self.server = server
        self.seconds_per_block = server.seconds_per_block
        self.entry_seconds = HOP_SECONDS + server.queue_seconds
        self.seconds = math.inf
        self.start = 0
        self.before: _Route | None = None


def _cheapest(group: Sequence[Candidate], blocks: Span) -> PlannedChain | None:
    usable = [
        each for each in group if each.has_pages and each.span.start < blocks.end and blocks.start < each.span.end
    ]
    edges = {edge for each in usable for edge in (each.span.start, each.span.end) if blocks.start < edge < blocks.end}
    boundaries = [blocks.start, *sorted(edges), blocks.end]
    # These hops are optimal, but may leave a server for a faster one in the middle of its span, and return to it later.
    hops = _all_at_once(usable, boundaries)
    if len({hop.server.server_id for hop in hops}) < len(hops):
        # No server can come twice if servers are taken in the order of their ends, and if there is a chain, then there
        # is one whose ends ascend.
        hops = _one_by_one(sorted(usable, key=lambda each: (each.span.end, each.span.start)), boundaries)
    return PlannedChain(hops, group[0].fingerprint, _seconds(hops)) if hops else None


def _all_at_once(servers: Sequence[Candidate], boundaries: Sequence[int]) -> tuple[PlannedHop, ...]:
    """Returns the cheapest hops, found boundary by boundary; a server may come twice. Empty: there is no chain."""
    starting: defaultdict[int, list[_RouteOnServer]] = defaultdict(list)
    ending: defaultdict[int, list[_RouteOnServer]] = defaultdict(list)
    for index, server in enumerate(servers):
        on_server = _RouteOnServer(index, server)
        starting[max(server.span.start, boundaries[0])].append(on_server)
        ending[server.span.end].append(on_server)
    # The servers that hold the blocks after the current boundary, in the given order, and the cheapest route to that
    # boundary; both by zone.
    under_way: defaultdict[str, list[_RouteOnServer]] = defaultdict(list)
    arrivals: dict[str, _Route] = {}
    # The cheapest route of all zones, and its seconds with a change of zone after it. The first hop changes no zone.
    cheapest: _Route | None = _Route(0.0)
    elsewhere = 0.0
    for here, boundary in pairwise(boundaries):
        for on_server in starting[here]:
            insort(under_way[on_server.server.zone], on_server, key=lambda on_server: on_server.index)
        earlier, arrivals = arrivals, {}
        for routes in sorted(filter(None, under_way.values()), key=lambda routes: routes[0].index):
            zone = routes[0].server.zone
            before = earlier.get(zone)
            if before is not None and before.seconds <= elsewhere:
                best = _extended(routes, here, boundary, before.seconds, before)
            else:
                best = _extended(routes, here, boundary, elsewhere, cheapest)
            if best.before is not None:
                arrivals[zone] = _Route(best.seconds, best.server, best.start, best.before)
        cheapest = min(arrivals.values(), key=lambda route: route.seconds, default=None)
        elsewhere = math.inf if cheapest is None else cheapest.seconds + OTHER_ZONE_SECONDS
        for on_server in ending[boundary]:
            under_way[on_server.server.zone].remove(on_server)
    return cheapest.hops(boundaries[-1]) if cheapest is not None else ()


def _extended(
    routes: Sequence[_RouteOnServer], here: int, boundary: int, seconds_here: float, before: _Route | None
) -> _RouteOnServer:
    """Extends the routes on the servers of one zone from `here` to `boundary`.

    A route enters its server `here` if that costs less than to have entered it earlier.

    Args:
        seconds_here: The seconds of the route `before`, with a change of zone after it if there is one.
        before: The cheapest route to `here` for a server of this zone.

    Returns:
        The cheapest route; the first one of equals.
    """
    num_blocks = boundary - here
    best, best_seconds = routes[0], math.inf
    for on_server in routes:
        seconds = on_server.seconds
        begun_here = seconds_here + on_server.entry_seconds
        if begun_here < seconds:
            seconds, on_server.start, on_server.before = begun_here, here, before
        on_server.seconds = seconds = seconds + num_blocks * on_server.seconds_per_block
        if seconds < best_seconds:
            best, best_seconds = on_server, seconds
    return best


def _one_by_one(servers: Sequence[Candidate], boundaries: Sequence[int]) -> tuple[PlannedHop, ...]:
    """Returns the cheapest hops that take the servers in the given order; empty: there is no chain."""
    num_blocks_before = [0, *(end - start for start, end in pairwise(boundaries))]
    # The cheapest route whose last server is in the zone, and its seconds; both by zone and boundary.
    routes: defaultdict[str, list[_Route | None]] = defaultdict(lambda: [None] * len(boundaries))
    seconds_in: defaultdict[str, list[float]] = defaultdict(lambda: [math.inf] * len(boundaries))
    # The cheapest route of all zones, and its seconds with a change of zone after it; both by boundary.
    cheapest: list[_Route | None] = [_Route(0.0), *([None] * (len(boundaries) - 1))]
    elsewhere = [0.0, *([math.inf] * (len(boundaries) - 1))]
    for server in servers:
        own_routes, own_seconds = routes[server.zone], seconds_in[server.zone]
        seconds_per_block, entry_seconds = server.seconds_per_block, HOP_SECONDS + server.queue_seconds
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
                    cheapest[index], elsewhere[index] = route, seconds + OTHER_ZONE_SECONDS
            if own <= elsewhere[index]:
                if own + entry_seconds < seconds:
                    seconds, start, before = own + entry_seconds, boundaries[index], own_routes[index]
            elif elsewhere[index] + entry_seconds < seconds:
                seconds, start, before = elsewhere[index] + entry_seconds, boundaries[index], cheapest[index]
    last_route = cheapest[-1]
    return last_route.hops(boundaries[-1]) if last_route is not None else ()


def _seconds(hops: Iterable[PlannedHop]) -> float:
    """Returns the seconds that a token takes through these hops."""
    seconds, zone = 0.0, None
    for server, span in ((hop.server, hop.span) for hop in hops):
        link_seconds = OTHER_ZONE_SECONDS if zone is not None and zone != server.zone else 0.0
        own_seconds = HOP_SECONDS + server.queue_seconds + len(span) * server.seconds_per_block
        seconds, zone = seconds + own_seconds + link_seconds, server.zone
    return seconds
