"""Calls between services that run, and whether those who make them are still believed."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from corolla.chassis.errors import Unauthenticated
from corolla.chassis.handlers import Call

_LOOK_INTERVAL_S: Final = 2.0


def end_once_unbelieved(call: Call[Any], is_believed: Callable[[], bool]) -> None:
    """Looks after a call, in the task that handles it: gRPC looks at certificates in the handshake, and at no list.

    Raises:
        Unauthenticated: its caller is not believed.
    """
    error = Unauthenticated("the certificate was revoked, has ended, or is of no authority that is believed")
    if not is_believed():
        raise error
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def look() -> None:
        if task is None or task.done() or call.failure is not None:
            return
        if is_believed():
            loop.call_later(_LOOK_INTERVAL_S, look)
            return
        call.failure = error
        task.cancel()

    loop.call_later(_LOOK_INTERVAL_S, look)
