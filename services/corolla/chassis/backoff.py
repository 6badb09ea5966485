"""How long to wait before something that failed is started again."""

from dataclasses import dataclass


@dataclass
class Backoff:
    """Doubled with each early failure, forgotten after a long life.

    Attributes:
        first_s: seconds before the first restart.
        most_s: seconds at most.
        healthy_s: what lived so long counts as healthy.
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
