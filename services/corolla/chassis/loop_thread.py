"""An event loop in a thread of its own, for synchronous code."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_STOP_TIMEOUT_S: Final = 5.0


class LoopStopped(Exception):
    """The loop has been stopped and runs no more work."""


class LoopThread:
    """Runs coroutines for other threads until it is stopped.

    The loop is never closed: gRPC delivers events to each loop that ever used gRPC, for as long as the process lives. A
    closed loop would raise `Event loop is closed`, and other loops would miss their events.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # The lock is reentrant: a finalizer may call `stop` in a thread that holds the lock to submit work.
        self._lock = threading.RLock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` and returns its result; an interrupt of the waiting thread cancels `work`.

        Raises:
            LoopStopped: The loop has been stopped.
        """
        with self._lock:
            if self._is_stopped:
                work.close()
                raise LoopStopped
            # An empty context: timers and tasks that outlive the call must not keep the caller's context alive.
            future: Future[Result] = Context().run(asyncio.run_coroutine_threadsafe, work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` soon, unless the loop was stopped."""
        with self._lock:
            if not self._is_stopped:
                self._loop.call_soon_threadsafe(work, context=Context())

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last()` for at most `_STOP_TIMEOUT_S` seconds, cancels all other tasks, and ends the thread.

        Any thread may call it. The call waits until the thread has ended, except in that thread itself.
        """
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await last()
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_STOP_TIMEOUT_S)
            self._loop.stop()
