import asyncio

import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.errors import ContextLengthExceeded, QueueFull
from corolla.client.generation.admission import Admission
from corolla.client.generation.stopping import FinishReason
from corolla.client.generation.usage import Usage
from corolla.client.metrics import ClientMetrics

TENANT = "ada"


class Door:
    """An admission, and what its metrics say."""

    def __init__(self, max_running: int, max_waiting: int = 0, max_bytes: int = 1000) -> None:
        self._registry = CollectorRegistry()
        self.admission = Admission(max_running, max_waiting, max_bytes, ClientMetrics(self._registry))

    def value(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"corolla_{name}", labels) or 0

    @property
    def held(self) -> tuple[float, float]:
        """Requests that wait and that run."""
        return self.value("num_requests_waiting"), self.value("num_requests_running")


async def test_a_request_waits_until_its_prompt_is_known_and_then_runs() -> None:
    door, usage = Door(2), Usage()
    async with door.admission.request(TENANT, 1, usage) as meter:
        assert door.held == (1, 0)
        meter.prompt(10, 4, 2)
        assert door.held == (0, 1)
        meter.prompt(0, 0, 0)
        assert door.held == (0, 1), "several completions are one request"
    assert door.held == (0, 0)
    assert door.value("prefix_cache_hits_total") == 4
    assert door.value("prefix_cache_queries_total") == door.value("prompt_tokens_total") == 10
    assert door.value("recomputed_tokens_total") == 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_every_way_out_gives_the_place_back(is_known: bool) -> None:
    door = Door(1)
    for _ in range(3):
        with pytest.raises(GeneratorExit):  # noqa: PT012
            async with door.admission.request(TENANT, 1, Usage()) as meter:
                if is_known:
                    meter.prompt(1, 0, 0)
                raise GeneratorExit
        assert door.held == (0, 0)


async def test_one_too_many_is_refused_and_takes_nothing() -> None:
    door = Door(1)
    async with door.admission.request(TENANT, 1, Usage()):
        with pytest.raises(QueueFull):
            async with door.admission.request(TENANT, 1, Usage()):
                pass
        assert door.held == (1, 0)
    async with door.admission.request(TENANT, 1, Usage()):
        pass


async def test_tokens_and_ends_are_counted() -> None:
    door, usage = Door(1), Usage()
    async with door.admission.request(TENANT, 1, usage) as meter:
        meter.prompt(3, 0, 0)
        for index in (0, 1, 0, 1, 0):
            meter.token(index)
        meter.finished(FinishReason.EOS)
    assert usage.completion_tokens == door.value("generation_tokens_total") == 5
    assert door.value("time_to_first_token_seconds_count") == 1
    # Between two tokens of one completion, never between those of different ones.
    assert door.value("inter_token_latency_seconds_count") == 3
    assert door.value("request_success_total", finished_reason="eos") == 1
    assert usage.time_to_first_token_s > 0


async def visit(door: Door, tenant: str, ran: list[str], leave: asyncio.Event) -> None:
    async with door.admission.request(tenant, 1, Usage()) as meter, meter.running():
        ran.append(tenant)
        await leave.wait()


async def test_who_waits_runs_when_a_place_is_free_and_is_counted_meanwhile() -> None:
    door, ran, leave = Door(1, max_waiting=2), list[str](), asyncio.Event()
    async with asyncio.TaskGroup() as visitors:
        for tenant in ("ada", "ada", "bob"):
            visitors.create_task(visit(door, tenant, ran, leave))
        await asyncio.sleep(0)
        assert ran == ["ada"]
        assert door.held == (3, 0)
        leave.set()
    assert ran == ["ada", "bob", "ada"]
    assert door.held == (0, 0)


async def test_who_has_more_waiting_makes_room_for_who_has_less() -> None:
    door, ran, leave = Door(1, max_waiting=2), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(visit(door, tenant, ran, leave)) for tenant in ("ada", "ada", "ada", "bob")]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert done == {tasks[2]}
    with pytest.raises(QueueFull):
        tasks[2].result()
    leave.set()
    await asyncio.gather(tasks[0], tasks[1], tasks[3])
    assert ran == ["ada", "bob", "ada"]


@pytest.mark.parametrize("num_turns", [0, 1, 2])
async def test_a_caller_that_leaves_the_line_leaves_no_gap(num_turns: int) -> None:
    door, ran, leave = Door(1, max_waiting=5), list[str](), asyncio.Event()
    first, second, third = (asyncio.create_task(visit(door, name, ran, leave)) for name in ("ada", "bob", "cyd"))
    await asyncio.sleep(0)
    leave.set()
    # Before, while and after its turn comes.
    for _ in range(num_turns):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert ran[-1] == "cyd"
    assert door.held == (0, 0)
    async with door.admission.request("ada", 1, Usage()) as meter, meter.running():
        pass


async def test_what_requests_hold_is_bounded_in_bytes() -> None:
    door = Door(4, max_waiting=4, max_bytes=100)
    async with door.admission.request(TENANT, 60, Usage()):
        with pytest.raises(QueueFull):
            async with door.admission.request(TENANT, 41, Usage()):
                pass
        async with door.admission.request(TENANT, 40, Usage()) as meter, meter.running():
            assert door.held == (2, 0)


async def test_a_prompt_that_is_refused_before_its_turn_leaves_the_line() -> None:
    door, ran, leave = Door(1, max_waiting=1), list[str](), asyncio.Event()
    running = asyncio.create_task(visit(door, "ada", ran, leave))
    await asyncio.sleep(0)
    with pytest.raises(ContextLengthExceeded):
        async with door.admission.request("bob", 1, Usage()):
            raise ContextLengthExceeded("prompt", "is too long")
    next_one = asyncio.create_task(visit(door, "bob", ran, leave))
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(running, next_one)
    assert ran == ["ada", "bob"]
