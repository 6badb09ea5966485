"""Servers that one recovery does without, and when it asks them again. Pure: time is passed in.

A stream that broke does not say whether its server is gone: the network may have forgotten the connection, or this very
process may have been frozen, and then all its streams broke at once. So where nobody else can take a server's place, it
is tried again, for a while, and less often the longer it takes: each time is one of the request's attempts.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

RETRY_INTERVAL_S: Final = 1.0
MOST_RETRY_INTERVAL_S: Final = 4.0


class LostServers(Collection[str]):
    """Ids of servers.

    Args:
        patience_s: how long after its first failure a server is tried again.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        # When it failed at first, and at last; None where it is of no use whatever it says.
        self._times: dict[str, tuple[float, float] | None] = {}

    def __contains__(self, server_id: object) -> bool:
        return server_id in self._times

    def __iter__(self) -> Iterator[str]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, server_id: str, now_s: float, *, for_good: bool = False) -> None:
        """It failed now. `for_good`: it is never tried again."""
        before = self._times.get(server_id, (now_s, now_s))
        self._times[server_id] = None if for_good or before is None else (before[0], now_s)

    def returned(self, server_ids: Iterable[str]) -> None:
        """They have opened: they are lost no longer."""
        for server_id in server_ids:
            self._times.pop(server_id, None)

    def due(self, now_s: float) -> frozenset[str]:
        """Those that may be tried again now, if nobody else can take their place."""
        return frozenset(
            server_id
            for server_id, times in self._times.items()
            if times is not None and _retry_s(*times) <= now_s < times[0] + self._patience_s
        )


def _retry_s(first_s: float, last_s: float) -> float:
    """When a server is due that failed at these times."""
    return last_s + min(max(RETRY_INTERVAL_S, last_s - first_s), MOST_RETRY_INTERVAL_S)
