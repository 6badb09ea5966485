"""Exponential back-off: how long to wait before something that failed is started again."""

from dataclasses import dataclass


@dataclass
class Backoff:
    """The delay before a failed task is started again. It doubles each time, and starts anew after a healthy task.

    Attributes:
        first_s: The delay before the first restart.
        most_s: The longest delay.
        healthy_s: A task that lived this long counts as healthy, so the delay starts anew.
    """

    first_s: float = 0.5
    most_s: float = 30.0
    healthy_s: float = 60.0
    _next_s: float = 0.0

    def delay_s(self, lived_s: float) -> float:
        if lived_s >= self.healthy_s or not self._next_s:
            self._next_s = self.first_s
        delay_s = self._next_s
        self._next_s = min(2 * self._next_s, self.most_s)
        return delay_s
