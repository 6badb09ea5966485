"""Which of several replicas a chain takes, so that sessions share routes. Pure.

A batch forms of sessions that take the same way. Were each hop chosen by itself, two spans of `r` replicas each would
make `r * r` ways, with a session here and there. So replicas have partners: a server's is that of the same rank behind
it, which all planners find alike from the placement, without knowing of each other's sessions.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from corolla.planning.planner import Candidate, PlannedChain, PlannedHop
from corolla.wire.span import Span

MAX_DETOUR: Final = 0.25
"""A partner's step may take so much longer than that of the cheapest hop; beyond, waiting for it costs more than a
larger batch saves."""


def with_partners(chain: PlannedChain, candidates: Sequence[Candidate]) -> PlannedChain:
    """The chain with each hop's partner behind it, where that has room and is hardly slower than what was planned.

    The first hop stays, so that sessions spread over its replicas as their loads say.

    Args:
        chain: the cheapest one.
        candidates: that it was planned of.
    """
    replicas: dict[_Role, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda each: each.server_id):
        replicas.setdefault(_role(each), []).append(each)
    hops: list[PlannedHop] = []
    for hop in chain.hops:
        if hops:
            before = hops[-1].server
            alike = replicas[_role(hop.server)]
            partner = alike[replicas[_role(before)].index(before) % len(alike)]
            others = {each.server.server_id for each in (*hops, *chain.hops)} - {hop.server.server_id}
            if _is_as_good(partner, hop) and partner.server_id not in others:
                hop = PlannedHop(partner, hop.span)
        hops.append(hop)
    return replace(chain, hops=tuple(hops))


_Role = tuple[str, Span, str]


def _role(server: Candidate) -> _Role:
    """What equal replicas have in common."""
    return server.fingerprint, server.span, server.zone


def _is_as_good(partner: Candidate, hop: PlannedHop) -> bool:
    return (
        partner.has_pages
        and partner.is_suspected <= hop.server.is_suspected
        and _seconds(partner, hop.span) <= (1 + MAX_DETOUR) * _seconds(hop.server, hop.span)
    )


def _seconds(server: Candidate, span: Span) -> float:
    return server.queue_seconds + len(span) * server.seconds_per_block
