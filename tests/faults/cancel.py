"""Callers that leave: whatever they leave behind is gone within a second."""

import asyncio
import random
import time

from tests.faults.figures import Figures, say
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_SECONDS_TO_EMPTY = 1.0
_NUM_AT_A_TIME = 8


async def cancel(stand: Stand, rng: random.Random, num_runs: int) -> int:
    """`num_runs` streams, cancelled before or after their first tokens, eight at a time."""
    figures = Figures(num_runs=num_runs)
    seeds = [rng.randrange(1 << 30) for _ in range(num_runs)]
    for start in range(0, num_runs, _NUM_AT_A_TIME):
        await asyncio.gather(*(_leave(stand, random.Random(seed)) for seed in seeds[start : start + _NUM_AT_A_TIME]))
    left_s = time.monotonic()
    while not await stand.is_empty():
        if time.monotonic() - left_s > 10 * MAX_SECONDS_TO_EMPTY:
            break
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - left_s
    figures.check(seconds <= MAX_SECONDS_TO_EMPTY, f"block servers were empty only after {seconds:.2f} s")
    for gauge in ("corolla_num_requests_running", "corolla_num_requests_waiting"):
        figures.check(await stand.metric(gauge) == 0, f"{gauge} is not back to zero")
    say(f"{num_runs} streams cancelled; all pages free after {seconds:.2f} s")
    return figures.conclude(0.0)


async def _leave(stand: Stand, rng: random.Random) -> None:
    answer = Answer(Question.draw(rng, rng.randint(1, 60), 200))
    task = asyncio.create_task(listen(stand.client, answer))
    if rng.random() < 0.3:
        await asyncio.sleep(rng.uniform(0, 0.05))
    else:
        await until_tokens(answer, rng.randint(1, 20), task)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
