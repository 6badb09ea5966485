"""A planner that lists every hop between two boundaries and relaxes them all, in O(servers x boundaries^2).

Slow, but easy to check: tests compare the chains of `corolla.planning.planner` with its chains, and the benchmark
`planner` its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from corolla.planning.planner import HOP_SECONDS, OTHER_ZONE_SECONDS, Candidate, PlannedChain, PlannedHop
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class _Route:
    seconds: float
    hop: PlannedHop | None = None
    before: "_Route | None" = field(default=None, repr=False)

    def hops(self) -> tuple[PlannedHop, ...]:
        taken: list[PlannedHop] = []
        route: _Route | None = self
        while route is not None and route.hop is not None:
            taken.append(route.hop)
            route = route.before
        return tuple(reversed(taken))


def cheapest(group: Sequence[Candidate], blocks: Span) -> PlannedChain | None:
    """The chain over `blocks` of servers of one fingerprint; None: there is none."""
    usable = [each for each in group if each.has_pages]
    edges = {edge for each in usable for edge in (each.span.start, each.span.end) if blocks.start < edge < blocks.end}
    boundaries = sorted({blocks.start, blocks.end, *edges})
    hops = [
        PlannedHop(each, Span(start, end))
        for each in usable
        for start in boundaries
        for end in boundaries
        if each.span.start <= start < end <= each.span.end
    ]
    # The search goes from left to right and finds the optimum, except that a long server may be left for a faster one
    # inside it and taken again.
    route = _relax(sorted(hops, key=lambda hop: hop.span.start), blocks)
    if route is not None and _repeats(route):
        # Server by server (the sort is stable), in order of where they end: none can come twice, and wherever there is
        # a chain there is one whose ends ascend.
        route = _relax(sorted(hops, key=lambda hop: (hop.server.span.end, hop.server.span.start)), blocks)
    if route is None:
        return None
    return PlannedChain(route.hops(), group[0].fingerprint, route.seconds)


def _relax(hops: Sequence[PlannedHop], blocks: Span) -> _Route | None:
    """The cheapest route to the last block that takes hops in the given order. Costs depend on the zone come from."""
    best: dict[int, dict[str | None, _Route]] = {blocks.start: {None: _Route(0.0)}}
    for hop in hops:
        server = hop.server
        own_seconds = HOP_SECONDS + server.queue_seconds + len(hop.span) * server.seconds_per_block
        arrivals = best.setdefault(hop.span.end, {})
        for zone, route in best.get(hop.span.start, {}).items():
            link_seconds = OTHER_ZONE_SECONDS if zone is not None and zone != server.zone else 0.0
            seconds = route.seconds + own_seconds + link_seconds
            if server.zone not in arrivals or seconds < arrivals[server.zone].seconds:
                arrivals[server.zone] = _Route(seconds, hop, route)
    return min(best.get(blocks.end, {}).values(), key=lambda route: route.seconds, default=None)


def _repeats(route: _Route) -> bool:
    names = [hop.server.server_id for hop in route.hops()]
    return len(set(names)) < len(names)
