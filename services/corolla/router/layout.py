"""Chooses spans for servers that join, one after another. Pure."""

from bisect import insort

from corolla.chassis.errors import SpanRefused
from corolla.planning.candidates import claimed_speeds, speed_among
from corolla.router.placement import HostedSpan, choose_span
from corolla.router.roster import Roster, end_blocks_of, memory_of
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span


class Layout:
    """The spans and speeds of a placement, and of servers that joined since.

    A roster is looked through once for all servers that join in a row.

    Attributes:
        version: The version of the placement with the servers that joined.
        last_change: The id of the last change.
    """

    def __init__(self, roster: Roster) -> None:
        self.version, self.last_change = roster.version, roster.last_change
        self._roster = roster
        self._ids = {each.server.server_id for each in roster.servers}
        self._addresses = {each.server.address for each in roster.servers}
        self._num_blocks = roster.num_blocks if roster.servers else 0
        # The spans, and the sorted speeds that were measured; both by fingerprint.
        self._hosted: dict[str, list[HostedSpan]] = {}
        self._speeds = claimed_speeds(roster.servers)

    def has(self, server: pb.ServerDescription) -> bool:
        """A server with this id or at this address is placed."""
        return server.server_id in self._ids or server.address in self._addresses

    def choose(self, server: pb.ServerDescription, wanted: Span | None) -> Span:
        """Returns the span for a server: the wanted one, or the one with which the server helps most.

        Raises:
            SpanRefused: The wanted span does not fit, or the server has another number of blocks than the others.
        """
        num_blocks = server.num_model_blocks
        if self._num_blocks not in (0, num_blocks):
            raise SpanRefused(
                f"the servers of this model have {self._num_blocks} blocks, this one has {num_blocks}; "
                "give it another model name or the same checkpoint"
            )
        if wanted is None:
            return choose_span(
                self._spans(server.fingerprint), num_blocks, server.capacity_blocks, self._speed(server),
                end_blocks_of(server), memory_of(server), server.kind,
            )  # fmt: skip
        if wanted.end > num_blocks:
            raise SpanRefused(f"span {wanted} reaches beyond the model's {num_blocks} blocks")
        if len(wanted) > server.capacity_blocks:
            raise SpanRefused(
                f"span {wanted} has {len(wanted)} blocks; the server has room for {server.capacity_blocks}"
            )
        return wanted

    def add(self, server: pb.ServerDescription, span: Span, version: int, last_change: str) -> None:
        """Takes a server into the layout, with which the placement has this version."""
        self._spans(server.fingerprint).append(
            HostedSpan(span, self._speed(server), end_blocks_of(server), server.kind)
        )
        if server.decode_tokens_per_second:
            insort(self._speeds.setdefault(server.fingerprint, []), server.decode_tokens_per_second)
        self._ids.add(server.server_id)
        self._addresses.add(server.address)
        self._num_blocks = server.num_model_blocks
        self.version, self.last_change = version, last_change

    def _spans(self, fingerprint: str) -> list[HostedSpan]:
        if fingerprint not in self._hosted:
            self._hosted[fingerprint] = self._roster.hosted(fingerprint)
        return self._hosted[fingerprint]

    def _speed(self, server: pb.ServerDescription) -> float:
        return speed_among(server, self._speeds.get(server.fingerprint, ()))
