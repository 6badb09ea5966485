"""Sessions that a planner has placed on servers and that no heartbeat reports yet. Pure: time is passed in.

A server reports its load with each heartbeat. Without bookings, all sessions that are planned between two heartbeats
would go to the same server, the least busy one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from corolla.v1 import blocks_pb2, common_pb2, router_pb2

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

    A server's answer to an open names its load, which counts the sessions of other processes, too. It counts until a
    newer heartbeat is known. Every session is counted in this time; for a moment, a session may be counted twice.

    Args:
        lag_s: The greatest age of a new heartbeat when this process sees it. A session that was placed less than this
            time before a heartbeat is seen may be missing from that heartbeat, so its booking stays.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        # The servers with the loads that heartbeats reported last; the load that a server named since; and for each
        # session on it the time of placement and the number of tokens. All by server id.
        self._placed: Mapping[str, router_pb2.PlacedServer] = {}
        self._answered: dict[str, blocks_pb2.HopLoad] = {}
        self._sessions: dict[str, list[tuple[float, int]]] = {}

    def book(self, hops: Iterable[common_pb2.Hop], num_tokens: int, now_s: float) -> None:
        """Records that a session that takes pages for `num_tokens` tokens is about to be opened on these hops."""
        for hop in hops:
            self._sessions.setdefault(hop.server_id, []).append((now_s, num_tokens))

    def hear(self, placed: Mapping[str, router_pb2.PlacedServer], now_s: float) -> None:
        """Drops the sessions that the newest known loads include.

        Args:
            placed: All servers of the placement by id. They must not be changed later.
        """
        before, self._placed = self._placed, placed
        for server_id, sessions in list(self._sessions.items()):
            if _heartbeat_number(placed, server_id) != _heartbeat_number(before, server_id):
                sessions = [each for each in sessions if each[0] > now_s - self._lag_s]
            if server_id in placed and sessions:
                self._sessions[server_id] = sessions
            else:
                del self._sessions[server_id]
        self._answered = {
            server_id: answered
            for server_id, answered in self._answered.items()
            if _heartbeat_number(placed, server_id) <= answered.heartbeat_number
        }

    def hear_answer(self, server_id: str, load: blocks_pb2.HopLoad) -> None:
        """Takes the load that a server named when it opened a session, or refused to.

        Opens are answered in order, so the session that was placed first is in this load, or nowhere.
        """
        if load.heartbeat_number < _heartbeat_number(self._placed, server_id):
            return
        self._answered[server_id] = load
        if len(sessions := self._sessions.get(server_id, [])) > 1:
            self._sessions[server_id] = sessions[1:]
        else:
            self._sessions.pop(server_id, None)

    def booked(self, server_id: str, now_s: float) -> Booked:
        """Returns the load to add to what the server has reported."""
        sessions, answered = self._sessions.get(server_id, ()), self._answered.get(server_id)
        if not sessions and answered is None:
            return _NOTHING
        if sessions and sessions[0][0] <= now_s - MOST_AGE_S:
            sessions = self._sessions[server_id] = [each for each in sessions if each[0] > now_s - MOST_AGE_S]
        num_sessions, num_tokens = len(sessions), sum(num_tokens for _, num_tokens in sessions)
        if answered is not None:
            num_sessions += max(0, answered.num_sessions - self._placed[server_id].load.num_sessions)
        return Booked(num_sessions, num_tokens + self.num_taken_tokens(server_id))

    def num_taken_tokens(self, server_id: str) -> int:
        """Returns how many tokens less a server had room for when it answered than when it reported."""
        answered, placed = self._answered.get(server_id), self._placed.get(server_id)
        if answered is None or placed is None or not placed.load.HasField("max_session_tokens"):
            return 0
        return max(0, placed.load.max_session_tokens - answered.max_session_tokens)


def _heartbeat_number(placed: Mapping[str, router_pb2.PlacedServer], server_id: str) -> float:
    """Returns the number of a server's last heartbeat; infinite: it is not placed."""
    return placed[server_id].load.heartbeat_number if server_id in placed else math.inf
