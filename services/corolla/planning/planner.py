"""The cheapest chain, by dynamic programming over the boundaries between blocks.

Pure. Since a hop's cost is linear in its number of blocks, some cheapest chain changes servers only where a server's
span starts or ends, so no other boundary is looked at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


def _cheapest(group: Sequence[Candidate], blocks: Span, costs: LinkCosts) -> PlannedChain | None:
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
    # From left to right: the optimum, except that a long server may be left for a faster one inside it and taken again.
    route = _relax(sorted(hops, key=lambda hop: hop.span.start), blocks, costs)
    if route is not None and _repeats(route):
        # Server by server (the sort is stable), in order of where they end: none can come twice, and wherever there is
        # a chain there is one whose ends ascend.
        route = _relax(sorted(hops, key=lambda hop: (hop.server.span.end, hop.server.span.start)), blocks, costs)
    if route is None:
        return None
    return PlannedChain(route.hops(), group[0].fingerprint, route.seconds)


def _relax(hops: Sequence[PlannedHop], blocks: Span, costs: LinkCosts) -> _Route | None:
    """The cheapest route to the last block that takes hops in the given order. Costs depend on the zone come from."""
    best: dict[int, dict[str | None, _Route]] = {blocks.start: {None: _Route(0.0)}}
    for hop in hops:
        server = hop.server
        own_seconds = costs.hop_seconds + server.queue_seconds + len(hop.span) * server.seconds_per_block
        arrivals = best.setdefault(hop.span.end, {})
        for zone, route in best.get(hop.span.start, {}).items():
            link_seconds = costs.other_zone_seconds if zone is not None and zone != server.zone else 0.0
            seconds = route.seconds + own_seconds + link_seconds
            if server.zone not in arrivals or seconds < arrivals[server.zone].seconds:
                arrivals[server.zone] = _Route(seconds, hop, route)
    return min(best.get(blocks.end, {}).values(), key=lambda route: route.seconds, default=None)


def _repeats(route: _Route) -> bool:
    names = [hop.server.server_id for hop in route.hops()]
    return len(set(names)) < len(names)
