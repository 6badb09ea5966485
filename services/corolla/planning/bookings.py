"""What a planner placed on servers which have not reported it yet. Pure: time is passed in.

A server says with each heartbeat what it holds. Until then all who come at once would find the same server the least
busy one, and all would go there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb

MOST_AGE_S: Final = 10.0
"""A booking of which no heartbeat tells in this time came to nothing, or its server is silent."""


@dataclass(frozen=True, slots=True)
class Booked:
    """What a server is to hold in addition to what it reported."""

    num_sessions: int = 0
    num_tokens: int = 0


class Bookings:
    """The sessions that this process placed, by server, from when it chose their hops until a heartbeat counts them.

    None is left out meanwhile; for a moment, one may be counted twice.

    Args:
        lag_s: how long before it is seen here a heartbeat may have been written, at most, after the one that was known.
            A session that is younger than that when a heartbeat is seen may not be in it.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        # By server: its newest heartbeat that was seen, and of each session when it was placed and its tokens.
        self._heartbeats: dict[str, int] = {}
        self._sessions: dict[str, list[tuple[float, int]]] = {}

    def book(self, hops: Iterable[common_pb2.Hop], num_tokens: int, now_s: float) -> None:
        """A session of so many tokens is about to be opened on these hops."""
        for hop in hops:
            self._sessions.setdefault(hop.server_id, []).append((now_s, num_tokens))

    def unreported(self, servers: Iterable[pb.PlacedServer], now_s: float) -> Mapping[str, Booked]:
        """What to add to the loads of these servers, by server id; what is theirs to tell by now is forgotten.

        Args:
            servers: all that are placed, with their newest known loads.
        """
        heartbeats = {each.server.server_id: each.load.heartbeat_number for each in servers}
        for server_id, sessions in list(self._sessions.items()):
            is_news = heartbeats.get(server_id) != self._heartbeats.get(server_id)
            oldest_s = now_s - (self._lag_s if is_news else MOST_AGE_S)
            self._sessions[server_id] = [each for each in sessions if each[0] > oldest_s]
            if server_id not in heartbeats or not self._sessions[server_id]:
                del self._sessions[server_id]
        self._heartbeats = heartbeats
        return {
            server_id: Booked(len(sessions), sum(num_tokens for _, num_tokens in sessions))
            for server_id, sessions in self._sessions.items()
        }
