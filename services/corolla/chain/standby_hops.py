"""The standbys of sessions on one chain, and how far each may be believed. Pure."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from corolla.v1 import common_pb2

TOKENS_BETWEEN_LOOKS: Final = 64
"""A standby may be gone, and a server may have joined that can stand by: a session looks again after so many tokens."""


@dataclass(slots=True)
class StandbyHop:
    """A server to which one hop copies the sessions of a chain.

    Attributes:
        hop: the server, with the blocks of the hop that copies.
        is_named: whether the hop that copies knows it in the sessions' present epoch.
        is_filled: whether it has held all settled tokens once, but for fewer than one part; it lacks few.
        num_trusted: for each session, by id, tokens from this position on may differ from the session's: the hops were
            opened again since, and compute them anew. None: all tokens count.
    """

    hop: common_pb2.Hop
    is_named: bool = False
    is_filled: bool = False
    num_trusted: Mapping[bytes, int] | None = None


@dataclass(slots=True)
class StandbyHops:
    """The standbys of one chain's hops.

    A standby gets only tokens that the answer keeps, and its client opens the sessions there in each epoch. So what it
    holds equals the sessions, unless these have been opened again or rewound meanwhile.

    Attributes:
        by_hop: the standbys by the id of the server that copies to them.
        refused: ids of servers that lost a session of this chain, or refused it.
        due_at: sessions of so many tokens need standbys that they do not have yet.
        pause: after how many further tokens the sessions look for standbys again.
        are_over: whether the sessions are closed, so that no standby may be named any more.
        num_placed: for how many chains each server stands by, by id; all chains of a process count in one.
    """

    by_hop: dict[str, StandbyHop] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    due_at: int = 0
    pause: int = TOKENS_BETWEEN_LOOKS
    are_over: bool = False
    num_placed: Counter[str] = field(default_factory=Counter)

    @property
    def hops(self) -> list[common_pb2.Hop]:
        """All standbys, as hops."""
        return [each.hop for each in self.by_hop.values()]

    @property
    def filled(self) -> list[common_pb2.Hop]:
        """The standbys that hold the texts but for their newest tokens, as hops."""
        return [each.hop for each in self.by_hop.values() if each.is_filled]

    def add(self, server_id: str, standby: StandbyHop) -> None:
        """Adds the standby of the hop with this id, which has none."""
        self.by_hop[server_id] = standby
        self.num_placed[standby.hop.server_id] += 1

    def remove(self, server_id: str) -> common_pb2.Hop:
        """Removes the standby of the hop with this id, and returns it."""
        standby = self.by_hop.pop(server_id).hop
        self.num_placed[standby.server_id] -= 1
        if not self.num_placed[standby.server_id]:
            del self.num_placed[standby.server_id]
        return standby

    def clear(self) -> None:
        for server_id in list(self.by_hop):
            self.remove(server_id)
        self.due_at = 0

    def guarded(self, chain: common_pb2.Chain) -> list[str]:
        """The addresses of the hops whose standbys can take their place at once."""
        named = {server_id for server_id, each in self.by_hop.items() if each.is_named}
        return [hop.address for hop in chain.hops if hop.server_id in named]

    def distrust(self, positions: Mapping[bytes, int]) -> None:
        """Notes that the sessions are opened again: of what standbys hold, only the tokens before these count."""
        for each in self.by_hop.values():
            before = positions if each.num_trusted is None else each.num_trusted
            each.num_trusted = {key: min(position, before.get(key, 0)) for key, position in positions.items()}
            each.is_named = False
        self.due_at = 0

    def replacements(self, lost: Collection[str]) -> dict[str, common_pb2.Hop]:
        """The usable standbys of lost hops, by the ids of these."""
        return {
            server_id: each.hop
            for server_id, each in self.by_hop.items()
            if server_id in lost and each.hop.server_id not in lost
        }

    def trusted_on(self, chain: common_pb2.Chain) -> Iterator[tuple[common_pb2.Hop, Mapping[bytes, int]]]:
        """Yields the hops of a chain that were standbys, and how many of their tokens count at most, by session."""
        for each in self.by_hop.values():
            if each.num_trusted is not None and each.hop in chain.hops:
                yield each.hop, each.num_trusted

    def settle(self, chain: common_pb2.Chain) -> Iterator[common_pb2.Hop]:
        """Keeps the standbys of the hops of a new chain. Yields those of the others that are not hops themselves."""
        server_ids = {hop.server_id for hop in chain.hops}
        for server_id, each in list(self.by_hop.items()):
            if each.hop.server_id in server_ids:
                self.remove(server_id)
            elif server_id not in server_ids:
                yield self.remove(server_id)
        self.due_at = 0
