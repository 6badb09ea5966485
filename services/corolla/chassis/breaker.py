"""A circuit breaker (Nygard, "Release It!"): calls to a service that does not answer fail at once for a while. Pure."""


class Breaker:
    """Opens after several failures in a row; then it admits a call now and then, to test whether the service is back.

    Args:
        max_failures: The number of failures in a row after which the breaker opens.
        rest_s: The seconds between two tests while the breaker is open.
    """

    def __init__(self, max_failures: int, rest_s: float) -> None:
        self._max_failures = max_failures
        self._rest_s = rest_s
        self._num_failures = 0
        self._next_try_s = 0.0

    def admits(self, now_s: float) -> bool:
        """A call may be made now. The caller reports the outcome of an admitted call."""
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
