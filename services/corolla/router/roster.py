"""One model's block servers at one version of the placement, as the store listed them.

Pure: turns what servers report into what placement and planner reckon with, and into the message that is pushed.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from corolla.chassis.errors import CorollaError
from corolla.router.placement import UNMEASURED_TOKENS_PER_SECOND, HostedSpan
from corolla.router.planner import Candidate, PlannedChain, least_uncovered, plan
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

SESSION_LOAD: Final = 0.05
"""What an open session adds to a server's time per block, as a part of it: most of them are idle or batched."""


@dataclass(frozen=True, slots=True)
class Roster:
    """`version` 0 and `num_blocks` 0: the store does not know the model. Servers are sorted by span, then id."""

    model: str
    version: int
    num_blocks: int
    servers: tuple[pb.PlacedServer, ...] = ()
    last_change: str = "0-0"

    @property
    def is_known(self) -> bool:
        return self.num_blocks > 0

    def hosted(self, fingerprint: str) -> list[HostedSpan]:
        """The spans of all servers with these weights, joining and draining ones included."""
        return [
            HostedSpan(_span(each.span), each.server.decode_tokens_per_second)
            for each in self.servers
            if each.server.fingerprint == fingerprint
        ]

    def without(self, server: pb.ServerDescription) -> "Roster":
        """The roster as it is once `server` has replaced what was registered under its id or at its address."""
        kept = tuple(
            each
            for each in self.servers
            if each.server.server_id != server.server_id and each.server.address != server.address
        )
        return Roster(self.model, self.version, self.num_blocks, kept, self.last_change)

    def candidates(
        self, *, fingerprint: str = "", num_tokens: int = 0, excluded: Collection[str] = ()
    ) -> list[Candidate]:
        """The ready servers with these weights (empty: any), save the excluded ones, by server id."""
        return [
            _candidate(each, num_tokens)
            for each in self.servers
            if each.state == pb.SERVER_STATE_READY
            and fingerprint in ("", each.server.fingerprint)
            and each.server.server_id not in excluded
        ]

    def carries(self, chain: common_pb2.Chain, *, fingerprint: str = "", excluded: Collection[str] = ()) -> bool:
        """Whether every hop of a recorded chain can be used now, by the incarnation that it names."""
        ready = {each.server_id: each for each in self.candidates(fingerprint=fingerprint, excluded=excluded)}
        return bool(chain.hops) and all(
            hop.server_id in ready
            and ready[hop.server_id].fingerprint == chain.fingerprint
            and ready[hop.server_id].span.covers(_span(hop.span))
            for hop in chain.hops
        )

    def uncovered(self) -> list[Span]:
        """Blocks without a ready server, of the fingerprint that covers most."""
        if not self.is_known:
            return []
        groups: dict[str, list[Candidate]] = {}
        for candidate in self.candidates():
            groups.setdefault(candidate.fingerprint, []).append(candidate)
        return least_uncovered(groups.values(), self.num_blocks)

    def placement(self) -> pb.Placement:
        """The message for watchers, with the cheapest chain if there is one."""
        message = pb.Placement(
            model=self.model,
            version=self.version,
            num_model_blocks=self.num_blocks,
            servers=self.servers,
            uncovered=map(block_span, self.uncovered()),
        )
        if self.is_known:
            try:
                message.cheapest_chain.CopyFrom(chain_message(plan(self.candidates(), self.num_blocks)))
            except CorollaError:
                message.ClearField("cheapest_chain")
        return message


def block_span(span: Span) -> common_pb2.BlockSpan:
    return common_pb2.BlockSpan(start=span.start, end=span.end)


def chain_message(chain: PlannedChain) -> common_pb2.Chain:
    return common_pb2.Chain(
        fingerprint=chain.fingerprint,
        hops=[
            common_pb2.Hop(server_id=hop.server.server_id, address=hop.server.address, span=block_span(hop.span))
            for hop in chain.hops
        ],
    )


def sort_servers(servers: Iterable[pb.PlacedServer]) -> tuple[pb.PlacedServer, ...]:
    return tuple(sorted(servers, key=lambda each: (each.span.start, each.span.end, each.server.server_id)))


def _span(message: common_pb2.BlockSpan) -> Span:
    return Span(message.start, message.end)


def _candidate(placed: pb.PlacedServer, num_tokens: int) -> Candidate:
    server, load, span = placed.server, placed.load, _span(placed.span)
    if load.decode_step_seconds > 0:
        seconds_per_block = load.decode_step_seconds / len(span)
    else:
        seconds_per_block = 1 / (server.decode_tokens_per_second or UNMEASURED_TOKENS_PER_SECOND)
    pages_are_known = load.page_tokens > 0 and load.num_pages > 0
    return Candidate(
        server_id=server.server_id,
        address=server.address,
        fingerprint=server.fingerprint,
        span=span,
        seconds_per_block=seconds_per_block * (1 + SESSION_LOAD * load.num_sessions),
        queue_seconds=load.num_queued_steps * seconds_per_block * len(span),
        zone=server.zone,
        has_pages=not pages_are_known or math.ceil(num_tokens / load.page_tokens) <= load.num_free_pages,
    )
