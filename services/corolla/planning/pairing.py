"""Chooses among replicas so that sessions share routes. Pure.

Sessions form a batch if they take the same route. If each hop were chosen by itself, two spans with `r` replicas each
would give `r * r` routes with few sessions on each. Therefore replicas have partners in the next span:
`replicas.Replicas.partners`. All planners derive the same partners from the placement and need not know each other's
sessions.
"""

from dataclasses import replace
from typing import Final

from corolla.planning.planner import Candidate, PlannedChain, PlannedHop
from corolla.planning.replicas import PlannedSession, Replicas
from corolla.wire.span import Span

MAX_DETOUR: Final = 0.25
"""A partner's step may take longer than the cheapest hop's by this share. Beyond that, waiting for the partner costs
more than a larger batch saves."""


def with_partners(
    chain: PlannedChain, replicas: Replicas, session: PlannedSession, *, keeps_numerics: bool = False
) -> PlannedChain:
    """Returns the chain with each later hop replaced by a partner of the hop before it, if one is about as good.

    The first hop stays, so that sessions spread over its replicas according to their loads. A partner reaches all other
    servers of the chain.

    Args:
        replicas: The servers from which it was planned.
        session: The session for which it was planned.
        keeps_numerics: Whether a partner must have the numerics of the hop that it replaces.
    """
    hops: list[PlannedHop] = []
    for hop in chain.hops:
        if hops:
            others = {each.server.server_id for each in (*hops, *chain.hops)} - {hop.server.server_id}
            no_partners = others | session.apart.of(others)
            partners = [
                partner
                for each in replicas.partners(hops[-1].server, hop.server)
                if (partner := session.counted(each)) is not None
                and _is_as_good(partner, hop)
                and partner.server_id not in no_partners
                and (not keeps_numerics or partner.numerics == hop.server.numerics)
            ]
            if partners and hop.server not in partners:
                hop = PlannedHop(min(partners, key=lambda each: _seconds(each, hop.span)), hop.span)
        hops.append(hop)
    return replace(chain, hops=tuple(hops))


def _is_as_good(partner: Candidate, hop: PlannedHop) -> bool:
    return (
        partner.has_pages
        and partner.is_suspected <= hop.server.is_suspected
        and _seconds(partner, hop.span) <= (1 + MAX_DETOUR) * _seconds(hop.server, hop.span)
    )


def _seconds(server: Candidate, span: Span) -> float:
    return server.queue_seconds + len(span) * server.seconds_per_block
