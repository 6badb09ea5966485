"""Iterations that fail one after the other: then a device is broken, and not a request."""

import logging
import os
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_MOST_IN_A_ROW: Final = 3


def _end_process() -> None:
    os._exit(1)


class Failures:
    """Ends this process when nothing can be computed here any more.

    Its sessions go on elsewhere, as after any other death, and whoever starts it again finds out whether the device is
    back. Nothing can be handed over: keys and values lie on the device.

    Args:
        give_up: ends the process.
    """

    def __init__(self, give_up: Callable[[], None] = _end_process) -> None:
        self._give_up = give_up
        self._num_in_a_row = 0

    def succeeded(self) -> None:
        """An iteration gave an output."""
        self._num_in_a_row = 0

    def failed(self) -> None:
        """An iteration ended with an exception that is no answer to a request."""
        self._num_in_a_row += 1
        if self._num_in_a_row == _MOST_IN_A_ROW:
            log.critical("nothing can be computed here; the server ends")
            self._give_up()
