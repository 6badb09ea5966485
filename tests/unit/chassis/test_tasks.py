"""The end of a background task has no effect, restarts it, or ends the service."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis import failpoints
from corolla.chassis.failpoints import InjectedFailure
from corolla.chassis.metrics import TaskMetrics
from corolla.chassis.tasks import TaskGroup


@pytest.fixture
def fatal() -> asyncio.Event:
    """Set when the service is to end."""
    return asyncio.Event()


@pytest.fixture
async def group(fatal: asyncio.Event) -> AsyncIterator[TaskGroup]:
    """The tasks of a service."""
    group = TaskGroup(fatal.set)
    yield group
    await group.close()


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise RuntimeError("what a prompt says")


async def end() -> None:
    """At once."""


async def test_a_group_ends_its_tasks_and_notes_those_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    group = TaskGroup()
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("waiting")

    waiting = group.start(wait(), "waiting")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait({group.start(fail(), "failing")})
        await asyncio.sleep(0)
    assert "a background task failed" in caplog.text
    assert "what a prompt says" not in caplog.text
    await group.close()
    assert waiting.cancelled()
    assert ended == ["waiting"]


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    group = TaskGroup(cancel_again_s=0.05)

    async def lose_one() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = group.start(lose_one(), "careless")
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await group.close()
    assert task.cancelled()


@pytest.mark.parametrize("run, how", [(fail, "RuntimeError at"), (end, "returned")])
async def test_an_essential_task_that_ends_is_the_end_of_the_service(
    group: TaskGroup, fatal: asyncio.Event, caplog: pytest.LogCaptureFixture, run: Any, how: str
) -> None:
    group.start_essential(run, "engine")
    async with asyncio.timeout(30):
        await fatal.wait()
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert vars(record)["task"] == "engine"
    assert vars(record)["where"].startswith(how)
    assert "what a prompt says" not in caplog.text


async def test_a_cancellation_from_outside_the_group_ends_the_service(group: TaskGroup, fatal: asyncio.Event) -> None:
    group.start_essential(for_ever, "engine").cancel()
    async with asyncio.timeout(30):
        await fatal.wait()


async def test_a_task_that_its_group_cancels_or_closes_has_not_failed(group: TaskGroup, fatal: asyncio.Event) -> None:
    unwanted, wanted = group.start_essential(for_ever, "heartbeats"), group.start_essential(for_ever, "engine")
    group.cancel(unwanted)
    await asyncio.wait({unwanted})
    await group.close()
    assert unwanted.cancelled()
    assert wanted.cancelled()
    assert not fatal.is_set()


async def test_a_closed_group_begins_nothing(group: TaskGroup) -> None:
    begun: list[str] = []

    async def begin() -> None:
        begun.append("begun")

    async def begin_another() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            late.append(group.start(begin(), "after another one"))

    late: list[asyncio.Task[None]] = []
    group.start(begin_another(), "another")
    await asyncio.sleep(0)
    await group.close()
    late += [group.start(begin(), "late"), group.start_restartable(begin, "neighbours")]
    await asyncio.wait(late)
    assert ([task.cancelled() for task in late], begun) == ([True] * 3, [])


async def test_the_parts_of_a_service_end_it_as_well(group: TaskGroup, fatal: asyncio.Event) -> None:
    part = group.subgroup()
    part.start_essential(fail, "placement_watch")
    async with asyncio.timeout(30):
        await fatal.wait()
    await part.close()


class Ends:
    """Fails a given number of times, then works."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.is_well = asyncio.Event()

    async def run(self) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError
        self.is_well.set()


@pytest.fixture
def pauses_s(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[float]":
    """The delay of each restart."""
    waited: asyncio.Queue[float] = asyncio.Queue()
    sleep, own = asyncio.sleep, threading.get_ident()

    async def note(seconds: float) -> None:
        if threading.get_ident() != own:  # services of other tests, which go on
            await sleep(seconds)
            return
        waited.put_nowait(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return waited


async def test_a_restartable_task_is_started_again_ever_later_and_counted(
    fatal: asyncio.Event, pauses_s: "asyncio.Queue[float]"
) -> None:
    registry = CollectorRegistry()
    group = TaskGroup(fatal.set, TaskMetrics(registry))
    work = Ends(3)
    task = group.start_restartable(work.run, "kubernetes")
    async with asyncio.timeout(30):
        await task
    assert work.is_well.is_set()
    assert [pauses_s.get_nowait() for _ in range(3)] == [0.5, 1.0, 2.0]
    assert registry.get_sample_value("corolla_task_restarts_total", {"task": "kubernetes"}) == 3
    assert not fatal.is_set()
    await group.close()


async def test_a_restartable_task_that_never_failed_is_counted_as_such() -> None:
    registry = CollectorRegistry()
    group = TaskGroup(metrics=TaskMetrics(registry))
    await group.start_restartable(end, "kubernetes")
    assert registry.get_sample_value("corolla_task_restarts_total", {"task": "kubernetes"}) == 0


async def test_without_a_service_essential_tasks_are_restarted(pauses_s: "asyncio.Queue[float]") -> None:
    group = TaskGroup()
    work = Ends(1)
    group.start_essential(work.run, "placement_watch")
    async with asyncio.timeout(30):
        # Also when it has returned.
        assert [await pauses_s.get() for _ in range(2)] == [0.5, 1.0]
    assert work.is_well.is_set()
    await group.close()


async def test_a_task_fails_where_it_waits_for_the_nth_time(
    group: TaskGroup, fatal: asyncio.Event, arm: Callable[[str], None]
) -> None:
    arm("fail:engine:4")
    rounds: list[int] = []

    async def run() -> None:
        while True:
            with contextlib.suppress(Exception):
                rounds.append(len(rounds))
                await asyncio.sleep(0)

    group.start_essential(run, "heartbeats")
    task = group.start_essential(run, "engine")
    async with asyncio.timeout(30):
        await fatal.wait()
    assert isinstance(task.exception(), InjectedFailure)
    assert rounds.count(2) == 1
    assert len(rounds) >= 3


async def test_a_task_with_a_later_failpoint_is_unchanged_until_then(arm: Callable[[str], None]) -> None:
    arm("fail:engine:99")
    answers: list[Any] = []

    async def work() -> None:
        answers.append(await asyncio.gather(asyncio.sleep(0, "a"), asyncio.sleep(0, "b")))
        try:
            async with asyncio.timeout(0.001):
                await asyncio.sleep(60)
        except TimeoutError:
            answers.append("late")

    await failpoints.within("engine", work())
    assert answers == [["a", "b"], "late"]
