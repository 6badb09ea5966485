"""More requests than the service takes: who runs, who waits, who is refused, and what a refusal leaves behind."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import QueueFull
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.refusals import refusal
from tests.integration.swarm import Swarm
from tests.integration.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_RUNNING = 3
NUM_WAITING = 3
NUM_TOKENS = 200
PROMPT = "the thin man"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
    folder: Path = tmp_path_factory.mktemp("overload")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    keys_file = folder / "keys"
    keys_file.write_text("ada:key-ada\nbob:key-bob\n")
    limits = {"max_running_requests": NUM_RUNNING, "max_waiting_requests": NUM_WAITING, "api_keys_file": keys_file}
    async with Swarm(folder, model, ["0:2", "2:5"], client=limits, api_key="key-ada") as swarm:
        yield swarm


class Visitors:
    """Requests that come all at once, and what became of them."""

    def __init__(self, swarm: Swarm) -> None:
        self.order: list[str] = []
        self.refused: Counter[str] = Counter()
        self._address = swarm.address

    async def visit(self, tenant: str) -> None:
        async with AsyncClient(self._address, api_key=f"key-{tenant}") as client:
            try:
                answer = await client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
            except QueueFull:
                self.refused[tenant] += 1
                return
            assert len(answer.token_ids) == NUM_TOKENS
            self.order.append(tenant)


async def fill(swarm: Swarm, visitors: Visitors) -> list[asyncio.Task[None]]:
    """As many of one tenant's requests as run and wait."""
    tasks = [asyncio.create_task(visitors.visit("ada")) for _ in range(NUM_RUNNING + NUM_WAITING)]

    async def is_full() -> bool:
        return await num_held(swarm) == NUM_RUNNING + NUM_WAITING

    await until(is_full)
    return tasks


async def num_held(swarm: Swarm) -> float:
    """Requests that run or wait."""
    metrics_port = swarm.clients[0].metrics_port
    return sum([await sample(metrics_port, f"corolla_num_requests_{state}") for state in ("running", "waiting")])


async def test_three_times_as_many_as_it_takes(swarm: Swarm) -> None:
    visitors = Visitors(swarm)
    most_sessions = 0

    async def watch() -> None:
        nonlocal most_sessions
        while True:
            most_sessions = max(most_sessions, *(each.num_sessions for each in await swarm.statuses()))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(visitors.visit("ada") for _ in range(3 * (NUM_RUNNING + NUM_WAITING))))
    watching.cancel()
    # Answers are quick here, so some of the later ones may find room.
    assert len(visitors.order) >= NUM_RUNNING + NUM_WAITING
    assert visitors.refused["ada"] == 3 * (NUM_RUNNING + NUM_WAITING) - len(visitors.order) > 0
    assert 0 < most_sessions <= NUM_RUNNING, "who waits or is refused has no session on any hop"
    await swarm.until_empty()
    assert await sample(swarm.clients[0].metrics_port, "corolla_num_requests_waiting") == 0


async def test_a_refusal_comes_at_once_and_says_when_to_come_back(swarm: Swarm) -> None:
    tasks = await fill(swarm, Visitors(swarm))
    request = pb.GenerateRequest(text=PROMPT, stopping=pb.StoppingParameters(max_tokens=NUM_TOKENS, ignore_eos=True))
    async with open_channel(swarm.address) as channel:
        started = time.monotonic()
        refused = await refusal(channel, "GenerateStream", request, api_key="key-ada")
        took_s = time.monotonic() - started
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refused.retry_after_s > 0
    # It waited for nobody: all places are still taken. (The time is generous, for a machine that is busy.)
    assert not any(task.done() for task in tasks)
    assert took_s < 1
    await asyncio.gather(*tasks)
    await swarm.until_empty()


async def test_a_flood_of_one_tenant_does_not_shut_out_another(swarm: Swarm) -> None:
    visitors = Visitors(swarm)
    tasks = await fill(swarm, visitors)
    await visitors.visit("bob")
    await asyncio.gather(*tasks)
    assert visitors.refused == {"ada": 1}
    # Bob had none running, so the first place that became free was his.
    assert visitors.order.index("bob") <= NUM_RUNNING + 1
    await swarm.until_empty()


async def test_who_gives_up_waiting_leaves_no_gap(swarm: Swarm) -> None:
    visitors = Visitors(swarm)
    tasks = await fill(swarm, visitors)
    for task in tasks[NUM_RUNNING:]:
        task.cancel()
    await asyncio.wait(tasks[NUM_RUNNING:])

    async def have_left() -> bool:
        return await num_held(swarm) <= NUM_RUNNING

    await until(have_left)
    await asyncio.gather(*tasks[:NUM_RUNNING], *(visitors.visit("bob") for _ in range(NUM_RUNNING)))
    assert Counter(visitors.order)["bob"] == NUM_RUNNING
    assert not visitors.refused
    await swarm.until_empty()
