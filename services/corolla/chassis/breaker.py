"""A circuit breaker: who was silent is left alone for a moment instead of being waited for again. Pure."""


class Breaker:
    """Opens after failures in a row; then one call at a time tries whether the other side is back.

    Args:
        max_failures: in a row, until it opens.
        rest_s: seconds between two tries while it is open.
    """

    def __init__(self, max_failures: int, rest_s: float) -> None:
        self._max_failures = max_failures
        self._rest_s = rest_s
        self._num_failures = 0
        self._next_try_s = 0.0

    def admits(self, now_s: float) -> bool:
        """Whether a call may be made now; one that is admitted must report how it went."""
        if self._num_failures < self._max_failures:
            return True
        if now_s < self._next_try_s:
            return False
        self._next_try_s = now_s + self._rest_s
        return True

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, now_s: float) -> None:
        self._num_failures += 1
        self._next_try_s = now_s + self._rest_s
