"""Servers that failed lately. Pure: time is passed in."""

from typing import Final, Literal

FIRST_S: Final = 5.0
MOST_S: Final = 60.0

QuarantineCause = Literal["open", "step"]
"""Whether a server did not open a session, or failed in the middle of one."""


class Quarantine:
    """Leaves a server out for a while, longer with each failure that follows soon."""

    def __init__(self) -> None:
        # Until when, and for how long that was.
        self._entries: dict[str, tuple[float, float]] = {}

    def add(self, server_id: str, now_s: float) -> bool:
        """Whether it was not in there before: many sessions learn of one death."""
        until_s, length_s = self._entries.get(server_id, (0.0, 0.0))
        if now_s < until_s:
            return False
        is_repeated = length_s and now_s < until_s + MOST_S
        length_s = min(2 * length_s, MOST_S) if is_repeated else FIRST_S
        self._entries[server_id] = (now_s + length_s, length_s)
        return True

    def count(self, now_s: float) -> int:
        """How many servers are left out now. Changes nothing, so any thread may ask."""
        return sum(now_s < until_s for until_s, _ in tuple(self._entries.values()))

    def active(self, now_s: float) -> frozenset[str]:
        """The servers to leave out now."""
        self._entries = {name: entry for name, entry in self._entries.items() if now_s < entry[0] + MOST_S}
        return frozenset(name for name, (until_s, _) in self._entries.items() if now_s < until_s)
