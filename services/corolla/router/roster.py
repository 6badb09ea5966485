"""One model's block servers at one version of the placement, as the store listed them. Pure.

This module converts what servers report to the inputs of placement and planner, and to the message for watchers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from corolla.planning.candidates import counted_speed, speed_bounds, steady
from corolla.planning.planner import least_uncovered
from corolla.planning.spares import Takeover, takeover
from corolla.router.placement import ENOUGH, HostedSpan, WeightMemory, throughput
from corolla.router.rebalancing import Member
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.beginnings import added
from corolla.wire.span import Span

_UNSETTLED_OF: Final = 32
"""One of so many servers may join, drain or be suspected while others move."""


@dataclass(frozen=True)
class Roster:
    """The servers of one model, sorted by span, then by id. If `num_blocks` is 0, the store does not know the model."""

    model: str
    version: int
    num_blocks: int
    servers: tuple[pb.PlacedServer, ...] = ()
    last_change: str = "0-0"
    adapters: tuple[pb.RegisteredAdapter, ...] = ()
    removed_adapters: tuple[common_pb2.AdapterVersion, ...] = ()

    @cached_property
    def by_id(self) -> dict[str, pb.PlacedServer]:
        return {each.server.server_id: each for each in self.servers}

    @property
    def is_known(self) -> bool:
        return self.num_blocks > 0

    def hosted(self, fingerprint: str) -> list[HostedSpan]:
        """Returns the spans of all servers with these weights, joining and draining ones included."""
        speeds = self._speeds()
        return [
            _hosted(each, speeds[each.server.server_id])
            for each in self.servers
            if each.server.fingerprint == fingerprint
        ]

    def _speeds(self) -> dict[str, float]:
        bounds = speed_bounds(self.servers)
        return {each.server.server_id: counted_speed(each, bounds[each.server.server_id]) for each in self.servers}

    @property
    def is_settled(self) -> bool:
        """No server joins, drains or is suspected; of a large fleet, some always do, and few may."""
        return _UNSETTLED_OF * sum(not _is_ready(each) for each in self.servers) <= len(self.servers)

    def members(self) -> dict[str, list[Member]]:
        """Returns all servers that stay, by fingerprint, for the rebalancer."""
        groups: dict[str, list[Member]] = {}
        speeds = self._speeds()
        for each in self.servers:
            if each.state == pb.SERVER_STATE_DRAINING:
                continue
            hosted = _hosted(each, steady(speeds[each.server.server_id]))
            server = each.server
            member = Member(
                server.server_id, hosted, server.movable, server.capacity_blocks, memory_of(server), _is_ready(each)
            )
            groups.setdefault(each.server.fingerprint, []).append(member)
        return groups

    @property
    def has_spares(self) -> bool:
        return any(each.load.spare_spans for each in self.servers)

    def takeover(self) -> Takeover | None:
        """Returns the server that keeps a lost span, and takes it over; see `planning.spares`."""

        def fits(placed: pb.PlacedServer, span: Span) -> bool:
            server = placed.server
            return len(span) <= server.capacity_blocks and memory_of(server).holds(span, self.num_blocks)

        return takeover(self.servers, self.num_blocks, fits)

    def slowest_block_tokens_per_second(self) -> float:
        """Returns the tokens per second of the slowest block on ready servers, for the fastest fingerprint."""
        groups: dict[str, list[HostedSpan]] = {}
        speeds = self._speeds()
        for each in self.servers:
            if each.state == pb.SERVER_STATE_READY:
                hosted = _hosted(each, speeds[each.server.server_id])
                groups.setdefault(each.server.fingerprint, []).append(hosted)
        return max((min(throughput(group, self.num_blocks)) for group in groups.values()), default=0) / 1e6

    def has_other_at_address(self, server: pb.ServerDescription) -> bool:
        return any(
            each.server.address == server.address and each.server.server_id != server.server_id for each in self.servers
        )

    def without(self, server: pb.ServerDescription) -> "Roster":
        """Returns the roster without the servers that have this server's id or address."""
        kept = tuple(
            each
            for each in self.servers
            if each.server.server_id != server.server_id and each.server.address != server.address
        )
        return self if len(kept) == len(self.servers) else replace(self, servers=kept)

    def places(self, hop: common_pb2.Hop) -> bool:
        """The server of a hop is registered, at the hop's address and with its blocks."""
        placed = self.by_id.get(hop.server_id)
        return (
            placed is not None
            and placed.server.address == hop.address
            and Span.from_message(placed.span).covers(Span.from_message(hop.span))
        )

    @cached_property
    def _spans(self) -> Sequence[Sequence[Span]]:
        """The spans of the ready servers, in groups by fingerprint."""
        groups: dict[str, list[Span]] = {}
        for each in self.servers:
            if each.state == pb.SERVER_STATE_READY:
                groups.setdefault(each.server.fingerprint, []).append(Span.from_message(each.span))
        return list(groups.values())

    @cached_property
    def uncovered(self) -> list[Span]:
        """The blocks without a ready server, for the fingerprint that covers most blocks."""
        return least_uncovered(self._spans, Span(0, self.num_blocks)) if self.is_known else []

    def num_single_copy_blocks(self) -> int:
        """Returns the number of blocks with exactly one ready server, for the fingerprint that covers most blocks."""
        copies = [Counter(block for span in spans for block in range(span.start, span.end)) for spans in self._spans]
        return list(max(copies, key=len, default=Counter()).values()).count(1)

    @cached_property
    def placement(self) -> pb.Placement:
        """The whole placement. It must not be changed.

        Only watchers get the beginnings of texts that servers hold.
        """
        message = self._message()
        message.servers.extend(self.servers)
        for each in message.servers:
            if each.load.beginnings:
                each.load.beginnings = b""
        message.adapters.extend(self.adapters)
        message.removed_adapters.extend(self.removed_adapters)
        return message

    def first_push(self, turn: float) -> pb.Placement:
        """Returns the message for a watcher that knows nothing yet."""
        message = pb.Placement(turn=turn)
        message.MergeFrom(self.placement)
        for each, placed in zip(message.servers, self.servers, strict=True):
            if placed.load.beginnings:
                each.load.beginnings = placed.load.beginnings
        return message

    def changes_since(self, before: "Roster") -> pb.Placement:
        """Returns the message for watchers that know the placement `before`."""
        message = self._message()
        message.change.gone_server_ids.extend(before.by_id.keys() - self.by_id.keys())
        for each in self.servers:
            known = before.by_id.get(each.server.server_id)
            if known is each:
                continue
            if known is not None and (known.server, known.span) == (each.server, each.span):
                changed = message.servers.add(
                    server=pb.ServerDescription(server_id=each.server.server_id), state=each.state, load=each.load,
                    suspected=each.suspected, doubted=each.doubted,
                )  # fmt: skip
                if each.load.beginnings:
                    changed.load.beginnings = added(known.load.beginnings, each.load.beginnings)
            else:
                message.servers.append(each)
        message.change.same_adapters = (self.adapters, self.removed_adapters) == (
            before.adapters, before.removed_adapters,
        )  # fmt: skip
        if not message.change.same_adapters:
            message.adapters.extend(self.adapters)
            message.removed_adapters.extend(self.removed_adapters)
        return message

    def _message(self) -> pb.Placement:
        """Returns what watchers learn of the placement as a whole."""
        message = pb.Placement(
            model=self.model,
            version=self.version,
            num_model_blocks=self.num_blocks,
            uncovered=[span.to_message() for span in self.uncovered],
        )
        if self.is_known and not self.uncovered:
            message.cheapest_chain.SetInParent()
        return message


def _is_ready(placed: pb.PlacedServer) -> bool:
    return placed.state == pb.SERVER_STATE_READY and not placed.suspected


def _hosted(placed: pb.PlacedServer, speed: float) -> HostedSpan:
    kind = "" if placed.state == pb.SERVER_STATE_DRAINING else placed.server.kind
    return HostedSpan(Span.from_message(placed.span), speed, end_blocks_of(placed.server), kind)


def end_blocks_of(server: pb.ServerDescription) -> float:
    """Returns the time of what a server computes after the last block (head, draft model), as a number of blocks."""
    return server.head_blocks + server.draft_blocks


def memory_of(server: pb.ServerDescription) -> WeightMemory:
    """Returns a server's memory for weights as the server reports it, or `ENOUGH` if it reports nothing."""
    if not server.weight_blocks:
        return ENOUGH
    return WeightMemory(server.weight_blocks, server.head_blocks, server.tied_edges, server.draft_blocks)


def place_of(placed: pb.PlacedServer) -> tuple[int, int, str]:
    """Returns what servers of a roster are sorted by."""
    return placed.span.start, placed.span.end, placed.server.server_id
