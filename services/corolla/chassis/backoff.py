"""Exponential back-off: how long to wait before something that failed is started again. Pure."""

from typing import Final

_FIRST_S: Final = 0.5
_MOST_S: Final = 30.0
_HEALTHY_S: Final = 60.0


class Backoff:
    """The delay before a failed task is started again. It doubles each time, and starts anew after a minute of life."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def delay_s(self, lived_s: float) -> float:
        delay_s = _FIRST_S if lived_s >= _HEALTHY_S else self._next_s
        self._next_s = min(2 * delay_s, _MOST_S)
        return delay_s
