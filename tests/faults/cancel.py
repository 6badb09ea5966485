"""Callers cancel, vanish or stop reading: the services free everything of theirs within a second."""

import asyncio
import random
import time

import psutil

from corolla.sdk.async_client import AsyncClient
from tests.faults.figures import Figures, say
from tests.faults.pauses import PAUSES
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_SECONDS_TO_EMPTY = 1.0
MAX_GROWTH_MIB = 64.0
_NUM_AT_A_TIME = 8
_NUM_SLOW = 16
_SLOW_S = 5.0


async def cancel(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """A stream for each run, cancelled or cut off around its first tokens, eight at a time; then slow ones."""
    figures = Figures(num_runs=len(runs))
    seeds = [rng.randrange(1 << 30) for _ in runs]
    for start in range(0, len(runs), _NUM_AT_A_TIME):
        await asyncio.gather(*(_leave(stack, random.Random(seed)) for seed in seeds[start : start + _NUM_AT_A_TIME]))
    await _check_empty(stack, figures, f"{len(runs)} streams cancelled or cut off")
    await _read_slowly(stack, rng, figures)
    await _check_empty(stack, figures, f"{_NUM_SLOW} slow readers gone")
    return figures.conclude(0.0)


async def _leave(stack: RunningStack, rng: random.Random) -> None:
    """Cancels an answer; every other time its connection is its own, and ends with the stream."""
    answer = Answer(Question.draw(rng, rng.randint(1, 60), 200))
    is_cut_off = rng.random() < 0.5
    client = AsyncClient(stack.service.address) if is_cut_off else stack.client
    task = asyncio.create_task(listen(client, answer))
    if rng.random() < 0.3:
        await asyncio.sleep(rng.uniform(0, 0.05))
    else:
        await until_tokens(answer, rng.randint(1, 20), task)
    if is_cut_off:
        await client.close()
    else:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _read_slowly(stack: RunningStack, rng: random.Random, figures: Figures) -> None:
    """Streams whose callers read only the first token: they wait, and their memory stays bounded."""
    service = psutil.Process(stack.local.pid(stack.service.name))
    before_mib = service.memory_info().rss / 2**20
    streams = []
    for _ in range(_NUM_SLOW):
        question = Question.draw(rng, 4, 7000)
        streams.append(stack.client.stream(question.prompt, **question.arguments()))
        await anext(streams[-1])
    await asyncio.sleep(_SLOW_S)
    # Others are served meanwhile.
    answer = Answer(Question.draw(rng, 4, 32))
    await listen(stack.client, answer)
    figures.check(len(answer.token_ids) == 32, f"beside slow readers an answer failed: {answer.failure}")
    growth_mib = service.memory_info().rss / 2**20 - before_mib
    figures.check(growth_mib <= MAX_GROWTH_MIB, f"the client service grew by {growth_mib:.0f} MiB")
    say(f"{_NUM_SLOW} streams unread for {_SLOW_S:.0f} s; the client service grew by {growth_mib:.1f} MiB")
    for stream in streams:
        stream.close()


async def _check_empty(stack: RunningStack, figures: Figures, what: str) -> None:
    left_s = time.monotonic()
    while not await _is_quiet(stack):
        if time.monotonic() - left_s > 10 * MAX_SECONDS_TO_EMPTY:
            break
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - left_s - PAUSES.num_seconds(left_s)
    figures.check(seconds <= MAX_SECONDS_TO_EMPTY, f"all was free only after {seconds:.2f} s")
    say(f"{what}; all pages and requests gone after {seconds:.2f} s")


async def _is_quiet(stack: RunningStack) -> bool:
    """No block server holds a page, and the client service runs nothing."""
    running = await stack.metric("corolla_num_requests_running") + await stack.metric("corolla_num_requests_waiting")
    return running == 0 and await stack.is_empty()
