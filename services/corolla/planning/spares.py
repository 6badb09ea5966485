"""Chooses the spans that a server keeps in addition to its own, and which server takes a lost span over. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.planning.losses import loss_seconds
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span, gaps

MOST_SPARE_SPANS: Final = 16
"""The most spans that one server keeps in addition to its own."""
_SOON_S: Final = 2.0
"""A server that joins is later than a spare if it needs longer, or does not know how long it needs."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """A server that shall hold a span some of whose blocks no server has any more.

    Attributes:
        at_once: Whether no server that leaves has these blocks either, so that no answer can go on.
    """

    server_id: str
    span: Span
    at_once: bool


def spans_to_keep(servers: Collection[pb.PlacedServer], own_id: str, kept: Collection[Span] = ()) -> list[Span]:
    """Returns the spans of other ready servers, the one whose loss would cost most first; lost ones stay kept.

    A span with a block that no other server holds comes before all that others hold as well. Then come spans that this
    server keeps already, since loads waver and reading takes long; then those that fewer other servers keep; then those
    whose loss costs more seconds. A server that alone holds some block may not leave it, and keeps no further spans.

    Args:
        own_id: The id of the server that keeps them. While the placement lacks it, it keeps what it has.
        kept: The spans that it keeps now.
    """
    own = next((each for each in servers if each.server.server_id == own_id), None)
    if own is None:
        return sorted(kept)
    alike = [each for each in servers if _is_ready(each) and each.server.fingerprint == own.server.fingerprint]
    num_holders = _num_holders(alike)
    seconds, own_span = loss_seconds(servers), Span.from_message(own.span)
    keepers = Counter(
        Span.from_message(span) for each in alike if each.server.server_id != own_id for span in each.load.spare_spans
    )
    costs: dict[Span, float] = {}
    for each in alike:
        span = Span.from_message(each.span)
        if not own_span.covers(span):
            costs[span] = max(costs.get(span, 0.0), seconds.get(each.server.server_id, 0.0))
    costs |= {span: math.inf for span in kept if not all(num_holders[block] for block in _blocks(span))}

    def rank(span: Span) -> tuple[bool, bool, int, float, int, int]:
        is_single = any(num_holders[block] < 2 for block in _blocks(span))
        return not is_single, span not in kept, keepers[span], -costs[span], span.start, span.end

    may_leave = all(num_holders[block] > 1 for block in _blocks(own_span))
    return sorted((span for span in costs if may_leave or span in kept), key=rank)[:MOST_SPARE_SPANS]


def fitting(wanted: Iterable[Span], num_bytes: Mapping[Span, int], room: int) -> list[Span]:
    """Returns the spans that fit into so many bytes together; one that does not fit leaves its room to later ones."""
    chosen = []
    for span in wanted:
        if num_bytes[span] <= room:
            room -= num_bytes[span]
            chosen.append(span)
    return chosen


def takeover(
    servers: Sequence[pb.PlacedServer], num_blocks: int, fits: Callable[[pb.PlacedServer, Span], bool]
) -> Takeover | None:
    """Returns the server that takes over blocks that no server has any more; None: no spare can, or none are lost.

    A block counts as lost if no ready server holds it, and none that joins and is ready soon. A server that moves may
    leave behind no block that it alone holds. Of several servers, the one comes first that takes over most lost blocks,
    then the one whose own loss would cost least.

    For example, a holds 0:15, b and c hold 15:30, and c keeps 0:15, too. If a is lost, c takes 0:15. If c held
    15:30 alone, it would stay.

    Args:
        fits: Says whether a server may hold a span.
    """
    groups: dict[str, list[pb.PlacedServer]] = {}
    for each in servers:
        groups.setdefault(each.server.fingerprint, []).append(each)
    for group in groups.values():
        # A suspected server may live: it counts until it is removed.
        held = [each for each in group if each.state == pb.SERVER_STATE_READY or _is_ready_soon(each)]
        missing = gaps([Span.from_message(each.span) for each in held], Span(0, num_blocks))
        if not missing:
            continue
        lost = {block for span in missing for block in _blocks(span)}
        ready = [each for each in group if _is_ready(each)]
        num_holders = _num_holders(ready)
        leaving = _num_holders(each for each in group if each.state == pb.SERVER_STATE_DRAINING)
        ranks = [
            (-len(lost.intersection(_blocks(span))), each.load.num_tokens_at_risk, each.server.server_id, span)
            for each in ready
            if each.server.movable
            for span in map(Span.from_message, each.load.spare_spans)
            if span.end <= num_blocks and not lost.isdisjoint(_blocks(span))
            if all(num_holders[block] > 1 or block in _blocks(span) for block in _blocks(Span.from_message(each.span)))
            if fits(each, span)
        ]
        if ranks:
            *_, server_id, span = min(ranks)
            return Takeover(server_id, span, any(not leaving[block] for block in lost.intersection(_blocks(span))))
    return None


def _is_ready(placed: pb.PlacedServer) -> bool:
    return placed.state == pb.SERVER_STATE_READY and not placed.suspected


def _is_ready_soon(placed: pb.PlacedServer) -> bool:
    return placed.state == pb.SERVER_STATE_JOINING and 0 < placed.load.start_seconds_left <= _SOON_S


def _num_holders(servers: Iterable[pb.PlacedServer]) -> Counter[int]:
    return Counter(block for each in servers for block in _blocks(Span.from_message(each.span)))


def _blocks(span: Span) -> range:
    return range(span.start, span.end)
