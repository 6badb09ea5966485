"""An event loop whose time is a number, and processes that run on it.

Nothing waits: when no task can run, time jumps to the next timer. A thread's job takes as long
as its process says. So a minute of virtual time costs what its events cost, and the same seed gives the same run.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar, cast

Result = TypeVar("Result")

START_S: Final = 1000.0
_MAX_TURNS_WITHOUT_TIME: Final = 50_000

_OWNER: ContextVar["Process | None"] = ContextVar("owner", default=None)


def current_process() -> "Process | None":
    """Whose task or callback runs now."""
    return _OWNER.get()


class Stuck(Exception):
    """No task can ever run again, or the tasks never stop."""


class Process:
    """The unit that is frozen, killed and restarted: all tasks and callbacks that began in it.

    Args:
        name: for people.
        compute_s: how long the next job of its threads takes.
    """

    def __init__(self, loop: "VirtualLoop", name: str, compute_s: Callable[[], float] = lambda: 0.001) -> None:
        self.name = name
        self.compute_s = compute_s
        self.is_frozen = False
        self.is_dead = False
        self.num_freezes = 0
        self.died = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._context: Context = copy_context()
        self._context.run(_OWNER.set, self)
        self._held_back: list[asyncio.Handle] = []
        self._at_resume: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name

    def start(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Runs `work` in the process."""
        return self._loop.create_task(work, context=self._context.copy())

    def keep_up(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work` as long as the process lives."""
        self.tasks.append(self.start(work))

    def call(self, work: Callable[[], Result]) -> Result:
        """Calls `work` as if the process did."""
        return self._context.copy().run(work)

    def freeze(self) -> None:
        """SIGSTOP. What becomes ready waits."""
        self.is_frozen = True
        self.num_freezes += 1

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_dead or not self.is_frozen:
            return
        self.is_frozen = False
        self._loop.continue_from(self._held_back)
        self._held_back = []
        for work in self._at_resume:
            self._loop.call_soon(work, context=Context())
        self._at_resume = []

    def kill(self) -> None:
        """SIGKILL: it never runs again, not even to clean up."""
        self.freeze()
        self.is_dead = True
        self.died.set()

    def when_running(self, work: Callable[[], None]) -> None:
        """Calls `work` from outside, when the process is not frozen."""
        if self.is_frozen:
            self._at_resume.append(work)
        else:
            work()

    def hold_back(self, handle: asyncio.Handle) -> None:
        self._held_back.append(handle)

    def dissolve(self) -> None:
        """After the end of a run: everything that is still there is cancelled and may end."""
        self.is_frozen = False
        self._loop.continue_from(self._held_back)
        self._held_back = []
        for task in self.tasks:
            task.cancel()


class _NumberedTask(asyncio.Task[Any]):
    """Sets of tasks are walked through in the same order in each run."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._hash = next(self._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._hash


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs everything in one thread; `time` moves only between callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = START_S
        self._num_idle_turns = 0
        self._free_s: dict[int, float] = {}
        self._executors: list[Any] = []  # held, so that no other one gets the same id
        self.set_task_factory(cast(Any, self._make_task))
        self.set_exception_handler(lambda _loop, _context: None)

    def time(self) -> float:
        return self._now_s

    def continue_from(self, handles: list[asyncio.Handle]) -> None:
        """Callbacks that were held back are ready, in their order."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def at(self, when_s: float, work: Callable[[], object]) -> asyncio.TimerHandle:
        """Calls `work` outside of all processes."""
        return self.call_at(when_s, work, context=Context())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, work: Callable[..., Result], *args: Any
    ) -> "asyncio.Future[Result]":
        """One job of an executor after another; each is done at its end, in one go."""
        future: asyncio.Future[Result] = self.create_future()
        owner = _OWNER.get()
        if executor is not None and id(executor) not in self._free_s:
            self._executors.append(executor)
        start_s = max(self._now_s, self._free_s.get(id(executor), 0.0)) if executor is not None else self._now_s
        end_s = start_s + (owner.compute_s() if owner is not None else 0.0)
        if executor is not None:
            self._free_s[id(executor)] = end_s

        def begin() -> None:
            if not future.cancelled():
                self.call_at(end_s, finish)

        def finish() -> None:
            try:
                result = work(*args)
            except BaseException as failure:
                if not future.done():
                    future.set_exception(failure)
                return
            if not future.done():
                future.set_result(result)

        self.call_at(start_s, begin)
        return future

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], *, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = _NumberedTask(work, loop=loop, context=context)
        owner = _OWNER.get() if context is None else context.get(_OWNER)
        if owner is not None:
            owner.tasks.append(task)
        return task

    def _write_to_self(self) -> None:
        """No real time passes."""

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            if not scheduled:
                raise Stuck("nothing is left to be done")
            if scheduled[0].when() > self._now_s:
                self._now_s = scheduled[0].when()
                self._num_idle_turns = 0
        self._num_idle_turns += 1
        if self._num_idle_turns > _MAX_TURNS_WITHOUT_TIME:
            raise Stuck("time stands still")
        while scheduled and scheduled[0].when() <= self._now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.cancelled():
                continue
            owner = handle._context.get(_OWNER)
            if owner is not None and owner.is_frozen:
                owner.hold_back(handle)
            else:
                handle._run()
