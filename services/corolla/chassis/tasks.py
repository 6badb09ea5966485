"""Background tasks of a service. There are three kinds, which differ in what their end means.

- One-shot (`start`): the task ends when its work is done. A failure is logged.
- Restartable (`start_restartable`): the service can work without the task for a while. A failed task is started again,
  with back-off.
- Essential (`start_essential`): the service is useless without the task. When the task ends, the process ends too, and
  the process' supervisor starts a new one.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from corolla.chassis import failpoints
from corolla.chassis.backoff import Backoff
from corolla.chassis.failpoints import EssentialTask
from corolla.chassis.handlers import call_path
from corolla.chassis.metrics import TaskMetrics

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, Any]
RestartableTask = Literal[
    "issuer_keys", "kubernetes", "meetings", "neighbours", "own_certificate", "pod_tags", "quotas",
    "spare_weights", "takeovers", "turn_lock", "watched_files",
]  # fmt: skip


@dataclass(eq=False, repr=False)
class TaskGroup:
    """The tasks of one owner. The group keeps references to them, and on close cancels and awaits them.

    Args:
        on_fatal: A function that is called when an essential task has ended. None: essential tasks are restarted like
            restartable ones; a library needs this, since it must not end its user's process.
        metrics: The metrics that count restarts.
        cancel_again_s: How long a cancelled task may take to end before it is cancelled again.
    """

    on_fatal: Callable[[], None] | None = None
    metrics: TaskMetrics | None = None
    _: KW_ONLY
    cancel_again_s: float = 5.0
    _tasks: set[asyncio.Task[Any]] = field(init=False, default_factory=set)
    _essential: set[asyncio.Task[Any]] = field(init=False, default_factory=set)
    _is_closed: bool = field(init=False, default=False)

    def subgroup(self) -> "TaskGroup":
        """Creates a group for a part of the service; that part closes the group."""
        return TaskGroup(self.on_fatal, self.metrics, cancel_again_s=self.cancel_again_s)

    def start(self, work: Work, name: str) -> asyncio.Task[Any]:
        """Runs `work` until it ends or the group closes; a failure is logged, not raised.

        In a closed group, the task is cancelled before it begins: what it would use may have been closed as well.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        if self._is_closed:
            task.cancel()
        return task

    def start_restartable(self, run: Callable[[], Work], name: RestartableTask) -> asyncio.Task[Any]:
        """Runs `run()` until it returns or the group closes; after an exception, it runs again."""
        return self.start(self._restart(run, name, is_endless=False), name)

    def start_essential(self, run: Callable[[], Work], name: EssentialTask) -> asyncio.Task[Any]:
        """Runs `run()` for ever; only `cancel` and `close` may end it."""
        if self.on_fatal is None:
            return self.start(self._restart(run, name, is_endless=True), name)
        task = self.start(failpoints.within(name, run()), name)
        if not self._is_closed:
            self._essential.add(task)
        return task

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Ends a task that is not needed any more. This does not count as a failure, even of an essential task."""
        self._essential.discard(task)
        task.cancel()

    async def close(self) -> None:
        """Cancels all tasks, several times if needed, and waits for their ends. From now on, no task begins.

        One cancellation may get lost: before Python 3.12, `asyncio.wait_for`, which libraries use, ignores a
        cancellation that arrives together with the awaited result.
        """
        self._is_closed = True
        self._essential.clear()
        while tasks := set(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=self.cancel_again_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if task in self._essential and self.on_fatal is not None:
            self._essential.discard(task)
            how = "cancelled" if task.cancelled() else _how(failure)
            log.critical(
                "an essential task ended; ending the process, so that it can be started again",
                extra={"task": task.get_name(), "where": how},
            )
            self.on_fatal()
        elif failure is not None:
            log.error("a background task failed", extra={"task": task.get_name(), "where": call_path(failure)})

    async def _restart(
        self, run: Callable[[], Work], name: EssentialTask | RestartableTask, *, is_endless: bool
    ) -> None:
        clock, backoff = asyncio.get_running_loop().time, Backoff()
        restarts = self.metrics.restarts.labels(name) if self.metrics is not None else None
        while True:
            started_s = clock()
            failure: BaseException | None = None
            try:
                await run()
                if not is_endless:
                    return
            except Exception as raised:
                failure = raised
            delay_s = backoff.delay_s(clock() - started_s)
            facts = {"task": name, "where": _how(failure), "restart_after_s": delay_s}
            log.error("a background task failed; starting it again", extra=facts)
            if restarts is not None:
                restarts.inc()
            await asyncio.sleep(delay_s)


def _how(failure: BaseException | None) -> str:
    return "returned" if failure is None else call_path(failure)
