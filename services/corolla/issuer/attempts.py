"""Bounds how often one address may be refused. Pure: time is passed in."""

from collections import OrderedDict
from typing import Final

from corolla.chassis.errors import QueueFull

MOST_REFUSALS: Final = 16
WINDOW_S: Final = 60.0
_MOST_ADDRESSES: Final = 4096


class Attempts:
    """Counts enrolments by address that were refused or still run, in windows of a minute.

    Of too many addresses, the oldest are forgotten.
    """

    def __init__(self) -> None:
        self._counted: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counted)

    def begin(self, address: str, now_s: float) -> None:
        """Counts an enrolment. Raises QueueFull while too many of the address count."""
        began_s, number = self._counted.get(address, (now_s, 0))
        if now_s >= began_s + WINDOW_S:
            began_s, number = now_s, 0
        if number >= MOST_REFUSALS:
            raise QueueFull(
                "too many enrolments from this address were refused", retry_after_s=began_s + WINDOW_S - now_s
            )
        self._counted[address] = (began_s, number + 1)
        self._counted.move_to_end(address)
        if len(self._counted) > _MOST_ADDRESSES:
            self._counted.popitem(last=False)

    def take_back(self, address: str) -> None:
        """Counts an enrolment no longer, since it was not refused."""
        began_s, number = self._counted.pop(address, (0.0, 0))
        if number > 1:
            self._counted[address] = (began_s, number - 1)
