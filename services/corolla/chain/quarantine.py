"""Remembers which servers new chains leave out, and when requests try lost servers again. Pure: time is passed in."""

from collections.abc import Hashable, Iterable
from typing import Final, Generic, Literal, TypeVar

FIRST_QUARANTINE_S: Final = 5.0
MOST_QUARANTINE_S: Final = 60.0

QuarantineCause = Literal["open", "step"]
"""Why a server is left out: it did not open a session, or it failed during a step."""

Name = TypeVar("Name", bound=Hashable)


class Quarantine(Generic[Name]):
    """Leaves something out for a while after a failure: twice as long as before if the last failure was not long ago.

    That is a server, by its id, or two servers as neighbours, since they do not reach each other.
    """

    def __init__(self) -> None:
        # Maps a name to the time until which it is left out, and to the seconds of this quarantine.
        self._entries: dict[Name, tuple[float, float]] = {}

    def add(self, name: Name, now_s: float) -> bool:
        """Leaves a name out. Returns False if it is left out already: many sessions report the same death."""
        until_s, length_s = self._entries.get(name, (0.0, 0.0))
        if now_s < until_s:
            return False
        is_repeated = length_s and now_s < until_s + MOST_QUARANTINE_S
        length_s = min(2 * length_s, MOST_QUARANTINE_S) if is_repeated else FIRST_QUARANTINE_S
        self._entries[name] = (now_s + length_s, length_s)
        return True

    def count(self, now_s: float) -> int:
        """How many names are left out now. It only reads, so any thread may call it."""
        return sum(now_s < until_s for until_s, _ in tuple(self._entries.values()))

    def active(self, now_s: float) -> frozenset[Name]:
        """The names to leave out now. The call also forgets old failures."""
        self._entries = {name: entry for name, entry in self._entries.items() if now_s < entry[0] + MOST_QUARANTINE_S}
        return frozenset(name for name, (until_s, _) in self._entries.items() if now_s < until_s)


FIRST_RETRY_INTERVAL_S: Final = 0.2
RETRY_INTERVAL_S: Final = 1.0
MOST_RETRY_INTERVAL_S: Final = 4.0


class LostServers(dict[str, tuple[float, float] | None]):
    """The servers that one request does without.

    The class maps a server id to the times of its first and its latest failure, or to None if it is never tried again.

    A broken stream does not prove that its server is gone: the network may have dropped the connection, or this process
    may have been frozen, which breaks all of its streams at once. So where no other server can take a lost one's place,
    the request tries the lost one again until `patience_s` after its first failure: at first almost at once, then less
    often. Each try counts as one of the request's attempts.
    """

    def __init__(self, patience_s: float) -> None:
        super().__init__()
        self._patience_s = patience_s

    def add(self, server_id: str, now_s: float, *, for_good: bool = False) -> None:
        """Records that a server failed now. With `for_good`, it is never tried again."""
        before = self.get(server_id, (now_s, now_s))
        self[server_id] = None if for_good or before is None else (before[0], now_s)

    def discard(self, server_ids: Iterable[str]) -> None:
        """Takes servers off the list after they opened the session."""
        for server_id in server_ids:
            self.pop(server_id, None)

    def retryable(self, now_s: float) -> frozenset[str]:
        """The servers that may be tried again now, where no other server can take their place."""
        return frozenset(
            server_id
            for server_id, times in self.items()
            if times is not None and _retry_s(*times) <= now_s < times[0] + self._patience_s
        )

    def may_return(self, now_s: float) -> bool:
        """One of the servers may be tried again, now or later."""
        return any(times is not None and now_s < times[0] + self._patience_s for times in self.values())


def _retry_s(first_s: float, last_s: float) -> float:
    """When to try a server again whose first and latest failures were at these times."""
    if first_s == last_s:
        return last_s + FIRST_RETRY_INTERVAL_S
    return last_s + min(max(RETRY_INTERVAL_S, last_s - first_s), MOST_RETRY_INTERVAL_S)
