"""The parts of a service as a table: they start in its order, and stop in the reverse order."""

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

Action = Callable[[], object]
"""A function, or a coroutine function. If a part has a stage, its `start` returns what was found, for people."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a service.

    Attributes:
        name: what `needs` of other parts call it.
        start: makes the part and starts it; None: the service's constructor has made it, such as a port.
        needs: the parts that `start` uses. They stand above this one, so no part can need itself, by whatever way.
        stop: frees what `start` has made.
        stage: what people call the work of this part and of those above it, up to the stage before.
    """

    name: str
    start: Action | None = None
    needs: Sequence[str] = ()
    stop: Action | None = None
    stage: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a start that has ended, the seconds that it took, and what it found."""

    name: str
    seconds: float
    found: str


class Parts:
    """The parts of one service.

    Attributes:
        started: the names of the parts that run, in order; a part runs until its `stop` has ended.
        stages: the stages of the start that have ended.

    Raises:
        ValueError: two parts have one name, or a part needs one that does not stand above it.
    """

    def __init__(self, *parts: Part) -> None:
        above: set[str] = set()
        for part in parts:
            if part.name in above or not above.issuperset(part.needs):
                raise ValueError(f"the part {part.name!r} stands twice, or above one that it needs")
            above.add(part.name)
        self._parts = parts
        self._running = [part for part in parts if part.start is None]
        self.started = [part.name for part in self._running]
        self.stages: list[Stage] = []

    @property
    def open_stage(self) -> str:
        """The stage that is under way or has failed; empty: all have ended."""
        stages = [part.stage for part in self._parts if part.stage]
        return stages[len(self.stages)] if len(self.stages) < len(stages) else ""

    async def start(self) -> None:
        """Starts the parts one after the other. After a failure, `stop` must be called."""
        began_s = time.monotonic()
        for part in self._parts:
            if part.start is None:
                continue
            found = await _run(part.start)
            self._running.append(part)
            self.started.append(part.name)
            if part.stage:
                ended_s = time.monotonic()
                self.stages.append(Stage(part.stage, ended_s - began_s, str(found or "")))
                began_s = ended_s

    async def stop(self) -> None:
        """Stops the parts that run, the last one first; if one fails, the others are stopped before that is raised.

        A part whose start failed is not stopped. A second call does nothing.
        """
        running = [part for part in self._parts if part in self._running]
        self._running.clear()
        async with AsyncExitStack() as stack:
            for part in running:
                stack.push_async_callback(self._stop, part)

    async def _stop(self, part: Part) -> None:
        try:
            if part.stop is not None:
                await _run(part.stop)
        finally:
            self.started.remove(part.name)


async def _run(action: Action) -> object:
    return await done if inspect.isawaitable(done := action()) else done
