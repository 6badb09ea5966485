import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import ContextLengthExceeded, InvalidRequest, NoChain, QueueFull
from corolla.client.generation.admission import Admission, AdmissionTicket, Caller, RequestMeter
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.metrics import ClientMetrics
from corolla.decoding.stopping import FinishReason

TENANT = "ada"


class MeasuredAdmission:
    """An admission, and its metrics."""

    def __init__(self, max_running: int, max_waiting: int = 0) -> None:
        self._registry = CollectorRegistry()
        self.admission = Admission(WaitingLine(max_running, max_waiting))
        self._metrics = ClientMetrics(self._registry)

    @asynccontextmanager
    async def request(self, caller: Caller) -> AsyncIterator[tuple[AdmissionTicket, RequestMeter]]:
        async with self.admission.enter(caller.tenant) as ticket:
            with RequestMeter(self._metrics, caller) as meter:
                yield ticket, meter

    def value(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"corolla_{name}", labels) or 0

    @property
    def held(self) -> tuple[float, float]:
        """Requests that wait and that run."""
        return self.value("num_requests_waiting"), self.value("num_requests_running")


async def test_a_request_waits_until_its_prompt_is_known_and_then_runs() -> None:
    subject = MeasuredAdmission(2)
    async with subject.request(Caller(TENANT)) as (_, meter):
        assert subject.held == (1, 0)
        meter.count_prompt(10, 4, 2)
        assert subject.held == (0, 1)
        meter.count_prompt(0, 0, 0)
        assert subject.held == (0, 1), "several completions are one request"
    assert subject.held == (0, 0)
    assert subject.value("cached_prompt_tokens_total") == 4
    assert subject.value("prompt_tokens_total") == 10
    assert subject.value("recomputed_tokens_total") == 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_every_way_out_gives_the_place_back(is_known: bool) -> None:
    subject = MeasuredAdmission(1)
    for _ in range(3):
        with pytest.raises(GeneratorExit):  # noqa: PT012
            async with subject.request(Caller(TENANT)) as (_, meter):
                if is_known:
                    meter.count_prompt(1, 0, 0)
                raise GeneratorExit
        assert subject.held == (0, 0)


async def test_one_too_many_is_refused_and_takes_nothing() -> None:
    subject = MeasuredAdmission(1)
    async with subject.request(Caller(TENANT)):
        with pytest.raises(QueueFull):
            async with subject.request(Caller(TENANT)):
                pass
        assert subject.held == (1, 0)
    async with subject.request(Caller(TENANT)):
        pass


async def test_tokens_and_ends_are_counted() -> None:
    subject, caller = MeasuredAdmission(1), Caller(TENANT)
    async with subject.request(caller) as (_, meter):
        meter.count_prompt(3, 0, 0)
        for index in (0, 1, 0, 1, 0):
            meter.count_tokens(index, 1)
        meter.count_finish(FinishReason.EOS)
    assert caller.usage.completion_tokens == subject.value("generation_tokens_total") == 5
    assert subject.value("time_to_first_token_seconds_count") == 1
    # Between two tokens of one completion, never between those of different ones.
    assert subject.value("inter_token_latency_seconds_count") == 3
    assert subject.value("request_success_total", finished_reason="eos") == 1
    assert caller.usage.time_to_first_token_seconds > 0


ENDS = {
    None: "eos",
    GeneratorExit: "abort",
    asyncio.CancelledError: "abort",
    lambda: InvalidRequest("n", "is wrong"): "refused",
    lambda: NoChain("no chain"): "error",
    ValueError: "error",
}


@pytest.mark.parametrize("num_answers", [0, 1, 3])
@pytest.mark.parametrize("failure, end", ENDS.items())
def test_each_answer_and_each_reading_ends_in_one_series(failure: Any, end: str, num_answers: int) -> None:
    registry = CollectorRegistry()
    with suppress(BaseException), RequestMeter(ClientMetrics(registry), Caller(TENANT), num_answers) as meter:
        for _ in range(num_answers if failure is None else num_answers - 1):
            meter.count_finish(FinishReason.EOS)
        if failure is not None:
            raise failure()
    series = {
        (sample.name.removeprefix("corolla_"), *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.value and sample.name.endswith(("_success_total", "_readings_total", "_count"))
    }
    if not num_answers:
        outcome = "done" if failure is None else end
        assert series == {("readings_total", outcome): 1, ("reading_seconds_count",): 1}
    else:
        assert sum(value for name, value in series.items() if name[0] == "request_success_total") == num_answers
        assert series["request_success_total", end] == (num_answers if failure is None else 1)
        assert series["e2e_request_latency_seconds_count",] == num_answers


async def request(subject: MeasuredAdmission, tenant: str, ran: list[str], leave: asyncio.Event) -> None:
    async with subject.request(Caller(tenant)) as (ticket, _):
        await ticket.admitted()
        ran.append(tenant)
        await leave.wait()


async def test_a_waiting_request_is_counted_and_runs_when_a_place_is_free() -> None:
    subject, ran, leave = MeasuredAdmission(1, max_waiting=2), list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as requests:
        for tenant in ("ada", "ada", "bob"):
            requests.create_task(request(subject, tenant, ran, leave))
        await asyncio.sleep(0)
        assert ran == ["ada"]
        assert subject.held == (3, 0)
        leave.set()
    assert ran == ["ada", "bob", "ada"]
    assert subject.held == (0, 0)


async def test_the_tenant_with_most_waiting_requests_makes_room_for_one_with_fewer() -> None:
    subject, ran, leave = MeasuredAdmission(1, max_waiting=2), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(request(subject, tenant, ran, leave)) for tenant in ("ada", "ada", "ada", "bob")]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert done == {tasks[2]}
    with pytest.raises(QueueFull):
        tasks[2].result()
    leave.set()
    await asyncio.gather(tasks[0], tasks[1], tasks[3])
    assert ran == ["ada", "bob", "ada"]


@pytest.mark.parametrize("num_turns", [0, 1, 2])
async def test_a_caller_that_leaves_the_line_leaves_no_gap(num_turns: int) -> None:
    subject, ran, leave = MeasuredAdmission(1, max_waiting=5), list[str](), asyncio.Event()
    first, second, third = (asyncio.create_task(request(subject, name, ran, leave)) for name in ("ada", "bob", "cyd"))
    await asyncio.sleep(0)
    leave.set()
    # Before, while and after its turn comes.
    for _ in range(num_turns):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert ran[-1] == "cyd"
    assert subject.held == (0, 0)
    async with subject.request(Caller("ada")) as (ticket, _):
        await ticket.admitted()
        pass


async def test_a_prompt_that_is_refused_before_its_turn_leaves_the_line() -> None:
    subject, ran, leave = MeasuredAdmission(1, max_waiting=1), list[str](), asyncio.Event()
    running = asyncio.create_task(request(subject, "ada", ran, leave))
    await asyncio.sleep(0)
    with pytest.raises(ContextLengthExceeded):
        async with subject.request(Caller("bob")):
            raise ContextLengthExceeded("prompt", "is too long")
    next_one = asyncio.create_task(request(subject, "bob", ran, leave))
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(running, next_one)
    assert ran == ["ada", "bob"]
