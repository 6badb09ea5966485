"""When a session's token is late, and when silence tells of a server rather than of this machine. Pure."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

_NUM_WAITS: Final = 64
FEWEST_WAITS: Final = 8
_LEAST_LATE_S: Final = 0.05

TICK_S: Final = 0.02
"""Silence is counted in ticks of this process's event loop, so a pause of this process counts as one tick."""
_LEAST_PATIENCE_S: Final = 0.1
_MOST_PATIENCE_S: Final = 0.5
_NUM_ANSWERS: Final = 16


class TokenWaits:
    """How long a session has waited for its newest tokens.

    The largest of the newest waits stands for their 99th percentile. A long wait that a hop explained by its answers
    counts, too, so a machine that becomes slow soon has no late tokens.
    """

    def __init__(self) -> None:
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)

    def add(self, wait_s: float) -> None:
        self._waits_s.append(wait_s)

    @property
    def late_after_s(self) -> float:
        """A token is late after so many seconds; infinite while too few tokens have come."""
        if len(self._waits_s) < FEWEST_WAITS:
            return math.inf
        return max(_LEAST_LATE_S, 3 * max(self._waits_s))


class Silences:
    """How long one server was silent each time that it was asked whether it lives.

    A server loses sessions only by a silence of twice the longest of its newest ones. So each silence that cost
    sessions raises the patience with this server, and one that pauses again and again keeps its sessions.

    Args:
        link_s: how long the first answer of the server took, for a slow link.
    """

    def __init__(self, link_s: float = 0.0) -> None:
        self._link_s = link_s
        self._num_ticks = 0
        self._ended_s: deque[float] = deque(maxlen=_NUM_ANSWERS)

    def tick(self) -> None:
        """Notes that the server was silent for one more tick."""
        self._num_ticks += 1

    def end(self) -> None:
        """Notes that the server was heard."""
        self._ended_s.append(self._num_ticks * TICK_S)
        self._num_ticks = 0

    @property
    def patience_s(self) -> float:
        """The server loses sessions after so many seconds of silence."""
        learned_s = min(2 * max(self._ended_s, default=0.0), _MOST_PATIENCE_S)
        return max(_LEAST_PATIENCE_S, self._link_s, learned_s)

    @property
    def was_long(self) -> bool:
        """One of the newest silences may have cost sessions."""
        return max(self._ended_s, default=0.0) >= _LEAST_PATIENCE_S

    @property
    def is_silent(self) -> bool:
        """The server has sent nothing for half the least patience. A server that was asked a bit later counts, too."""
        return self._num_ticks * TICK_S >= _LEAST_PATIENCE_S / 2

    @property
    def is_too_long(self) -> bool:
        """The present silence is longer than the patience with the server."""
        return self._num_ticks * TICK_S >= self.patience_s


def silent_one(guarded: Mapping[str, Silences], servers: Iterable[Silences]) -> str | None:
    """The address of a server that is silent for too long; None if more than a quarter of all are silent at once.

    Then this machine or its network is slow, or that of the servers. Servers are counted and not sessions, since one
    frozen server delays half of the sessions if a span has two.

    Args:
        guarded: the servers whose standbys can go on, by address.
        servers: all servers that this process is connected with. They are read only if a guarded one is silent: each
            late session asks in each tick.
    """
    address = next((address for address, each in guarded.items() if each.is_too_long), None)
    if address is None:
        return None
    are_silent = [each.is_silent for each in servers]
    return address if sum(are_silent) <= max(1, len(are_silent) // 4) else None
