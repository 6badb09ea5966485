"""Ends running calls between services when the caller's certificate is no longer valid."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from corolla.chassis.errors import Unauthenticated
from corolla.chassis.handlers import Call

_LOOK_INTERVAL_S: Final = 2.0


def end_when_invalid(call: Call[Any], is_valid: Callable[[], bool]) -> None:
    """Watches the caller's certificate while the current task handles a call, and ends the call if it becomes invalid.

    gRPC checks certificates only in the handshake, and ignores revocation lists.

    Args:
        is_valid: A function that says whether the caller's certificate is valid now.

    Raises:
        Unauthenticated: The certificate is not valid when this function is called.
    """
    error = Unauthenticated("the certificate was revoked, has ended, or is not of a trusted authority")
    if not is_valid():
        raise error
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def look() -> None:
        if task is None or task.done() or call.failure is not None:
            return
        if is_valid():
            loop.call_later(_LOOK_INTERVAL_S, look)
            return
        call.failure = error
        task.cancel()

    loop.call_later(_LOOK_INTERVAL_S, look)
