"""Chooses among replicas so that sessions share routes. Pure.

Sessions form a batch if they take the same route. If each hop were chosen by itself, two spans with `r` replicas each
would give `r * r` routes with few sessions on each. Therefore replicas have partners: the partners of a server are the
servers of the same rank in the next span. All planners derive the same partners from the placement and need not know
each other's sessions. If the next span has more replicas, each server has several partners; if it has fewer, servers
share them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from corolla.planning.planner import Candidate, PlannedChain, PlannedHop
from corolla.wire.span import Span

MAX_DETOUR: Final = 0.25
"""A partner's step may take longer than the cheapest hop's by this share. Beyond that, waiting for the partner costs
more than a larger batch saves."""


def with_partners(
    chain: PlannedChain, candidates: Sequence[Candidate], *, keeps_numerics: bool = False
) -> PlannedChain:
    """Returns the chain with each later hop replaced by a partner of the hop before it, if one is about as good.

    The first hop stays, so that sessions spread over its replicas according to their loads.

    Args:
        candidates: The servers from which it was planned.
        keeps_numerics: Whether a partner must have the numerics of the hop that it replaces.
    """
    replicas: dict[_Role, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda each: each.server_id):
        replicas.setdefault(_role(each), []).append(each)
    hops: list[PlannedHop] = []
    for hop in chain.hops:
        if hops:
            before = hops[-1].server
            ranked, alike = replicas[_role(before)], replicas[_role(hop.server)]
            others = {each.server.server_id for each in (*hops, *chain.hops)} - {hop.server.server_id}
            partners = [
                each
                for each in alike[ranked.index(before) % len(alike) :: len(ranked)]
                if _is_as_good(each, hop)
                and each.server_id not in others
                and (not keeps_numerics or each.numerics == hop.server.numerics)
            ]
            if partners and hop.server not in partners:
                hop = PlannedHop(min(partners, key=lambda each: _seconds(each, hop.span)), hop.span)
        hops.append(hop)
    return replace(chain, hops=tuple(hops))


_Role = tuple[str, Span, str]


def _role(server: Candidate) -> _Role:
    """Returns what replicas of each other have in common."""
    return server.fingerprint, server.span, server.zone


def _is_as_good(partner: Candidate, hop: PlannedHop) -> bool:
    return (
        partner.has_pages
        and partner.is_suspected <= hop.server.is_suspected
        and _seconds(partner, hop.span) <= (1 + MAX_DETOUR) * _seconds(hop.server, hop.span)
    )


def _seconds(server: Candidate, span: Span) -> float:
    return server.queue_seconds + len(span) * server.seconds_per_block
