"""What was opened with certificates that have been replaced, and goes on with the new ones before the old ones end."""

import asyncio
import logging
from typing import Final, Protocol

log = logging.getLogger(__name__)

_LOOK_INTERVAL_S: Final = 0.5


class Renewable(Protocol):
    """A channel or a stream that outlives the certificates it was opened with."""

    def renew(self) -> None:
        """Where certificates have changed since it was opened: begins to open it anew, or goes on with that.

        What it was opened with serves until the new one does. It is called again and again, also when nothing is new.
        """


class Renewals:
    """All that stands of one process. What has ended must be discarded."""

    def __init__(self) -> None:
        self._standing: set[Renewable] = set()

    def add(self, standing: Renewable) -> None:
        self._standing.add(standing)

    def discard(self, standing: Renewable) -> None:
        self._standing.discard(standing)

    async def run(self) -> None:
        """Renews them, for ever."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for standing in list(self._standing):
                try:
                    standing.renew()
                except Exception as failure:  # one that cannot must not keep the others from it
                    log.error("what stands cannot be renewed", extra={"failure": type(failure).__name__})
