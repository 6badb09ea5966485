"""Calls between services that run, and whether those who make them are still believed."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from corolla.chassis.errors import Unauthenticated
from corolla.chassis.handlers import Call

_LOOK_INTERVAL_S: Final = 2.0


class StandingCalls:
    """Ends calls whose callers' certificates no longer count: gRPC looks at them in the handshake, and at no list."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[Any], tuple[Call[Any], Callable[[], bool]]] = {}

    def add(self, call: Call[Any], is_believed: Callable[[], bool]) -> None:
        """The present task handles this call.

        Raises:
            Unauthenticated: its caller is not believed.
        """
        if not is_believed():
            raise _not_believed()
        task = asyncio.current_task()
        if task is not None:
            self._calls[task] = call, is_believed
            task.add_done_callback(self._calls.pop)

    async def run(self) -> None:
        """Looks after them, for ever."""
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for task, (call, is_believed) in list(self._calls.items()):
                if call.failure is None and not is_believed():
                    call.failure = _not_believed()
                    task.cancel()


def _not_believed() -> Unauthenticated:
    return Unauthenticated("the certificate was revoked, has ended, or is of no authority that is believed")
