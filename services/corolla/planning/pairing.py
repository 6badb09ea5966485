"""Which of several replicas a chain takes, so that sessions share routes. Pure.

A batch forms of sessions that take the same way. Were each hop chosen by itself, two spans of `r` replicas each would
make `r * r` ways, with a session here and there. So replicas have partners: a server's are those of the same rank in
the next span, which all planners find alike from the placement, without knowing of each other's sessions. Where there
are more replicas in the next span, each has several partners; where there are fewer, they are shared.
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
    """The chain with a partner behind each hop, where one has room and is hardly slower than what was planned.

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
            ranked, alike = replicas[_role(before)], replicas[_role(hop.server)]
            others = {each.server.server_id for each in (*hops, *chain.hops)} - {hop.server.server_id}
            partners = [
                each
                for each in alike[ranked.index(before) % len(alike) :: len(ranked)]
                if _is_as_good(each, hop) and each.server_id not in others
            ]
            if partners and hop.server not in partners:
                hop = PlannedHop(min(partners, key=lambda each: _seconds(each, hop.span)), hop.span)
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
