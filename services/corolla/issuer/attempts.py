"""Bounds how often one address may be refused. Pure: time is passed in."""

from collections import OrderedDict
from typing import Final

from corolla.chassis.errors import QueueFull

MOST_REFUSALS: Final = 16
WINDOW_S: Final = 60.0
_MOST_ADDRESSES: Final = 4096


class Attempts:
    """Counts refused enrolments by address, in windows of a minute. Of too many addresses, the oldest are forgotten."""

    def __init__(self) -> None:
        self._refused: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def check(self, address: str, now_s: float) -> None:
        """Raises QueueFull while an address has been refused too often."""
        began_s, number = self._refused.get(address, (now_s, 0))
        if number >= MOST_REFUSALS and now_s < began_s + WINDOW_S:
            raise QueueFull(
                "too many enrolments from this address were refused", retry_after_s=began_s + WINDOW_S - now_s
            )

    def refused(self, address: str, now_s: float) -> None:
        """Counts a refusal."""
        began_s, number = self._refused.pop(address, (now_s, 0))
        if now_s >= began_s + WINDOW_S:
            began_s, number = now_s, 0
        self._refused[address] = (began_s, number + 1)
        if len(self._refused) > _MOST_ADDRESSES:
            self._refused.popitem(last=False)
