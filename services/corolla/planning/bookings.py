"""Sessions that a planner has placed on servers and that no heartbeat reports yet. Pure: time is passed in.

A server reports its load with each heartbeat. Without bookings, all sessions that are planned between two heartbeats
would go to the same server, the least busy one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb

MOST_AGE_S: Final = 10.0
"""A booking is dropped when no heartbeat has come for this long: its session never opened, or its server is silent."""


@dataclass(frozen=True, slots=True)
class Booked:
    """The load that a server will have in addition to what it reported."""

    num_sessions: int = 0
    num_tokens: int = 0


_NOTHING: Final = Booked()


class Bookings:
    """The sessions that this process placed, by server, from the choice of their hops until a heartbeat counts them.

    Every session is counted in this time; for a moment, a session may be counted twice.

    Args:
        lag_s: The greatest age of a new heartbeat when this process sees it. A session that was placed less than this
            time before a heartbeat is seen may be missing from that heartbeat, so its booking stays.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        # The number of each server's newest known heartbeat, and for each session on it the time of placement and
        # the number of tokens; both by server id.
        self._heartbeats: dict[str, int] = {}
        self._sessions: dict[str, list[tuple[float, int]]] = {}

    def book(self, hops: Iterable[common_pb2.Hop], num_tokens: int, now_s: float) -> None:
        """Records that a session of `num_tokens` tokens is about to be opened on these hops."""
        for hop in hops:
            self._sessions.setdefault(hop.server_id, []).append((now_s, num_tokens))

    def hear(self, servers: Iterable[pb.PlacedServer], now_s: float) -> None:
        """Drops the sessions that the newest known loads of all servers of the placement include."""
        heartbeats = {each.server.server_id: each.load.heartbeat_number for each in servers}
        for server_id, sessions in list(self._sessions.items()):
            if heartbeats.get(server_id) != self._heartbeats.get(server_id):
                sessions = [each for each in sessions if each[0] > now_s - self._lag_s]
            if server_id in heartbeats and sessions:
                self._sessions[server_id] = sessions
            else:
                del self._sessions[server_id]
        self._heartbeats = heartbeats

    def booked(self, server_id: str, now_s: float) -> Booked:
        """Returns the load to add to what the server has reported."""
        if not (sessions := self._sessions.get(server_id)):
            return _NOTHING
        if sessions[0][0] <= now_s - MOST_AGE_S:
            sessions = self._sessions[server_id] = [each for each in sessions if each[0] > now_s - MOST_AGE_S]
        return Booked(len(sessions), sum(num_tokens for _, num_tokens in sessions))
