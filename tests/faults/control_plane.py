"""Redis freezes, forgets, restarts empty, stays away, is full; the router is killed: streams do not notice.

New requests are served meanwhile, from the last snapshot, and soon afterwards everything is as it was.
"""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from redis.asyncio import Redis

from benchmarks.figures import percentile
from corolla.chassis.errors import CorollaError
from tests.faults.figures import Figures, say
from tests.faults.pauses import PAUSES
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen, until_tokens
from tests.integration.waiting import until

MAX_STALL_S = 2.0
MAX_HEALING_S = 5.0
_GIVE_UP_S = 60.0
_NUM_STREAMS = 4
_NUM_QUESTIONS = 6


async def control_plane(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each fault in turn, with `_NUM_STREAMS` streams that run without a pause."""
    figures = Figures()
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(96, 256)) for _ in range(_NUM_QUESTIONS)]
    undisturbed = [Answer(question) for question in questions]
    await asyncio.gather(*(listen(stack.client, answer) for answer in undisturbed))
    healings_s = []
    for number in runs:
        figures.num_runs += 1
        what = list(_FAULTS)[number % len(_FAULTS)]
        healing_s = await _run(stack, rng, figures, undisturbed, what)
        if healing_s > MAX_HEALING_S:
            # What does not heal does not the second time either; what had no processor may.
            healing_s = min(healing_s, await _run(stack, rng, figures, undisturbed, what))
        figures.check(healing_s <= MAX_HEALING_S, f"routes were there again only after {healing_s:.2f} s")
        healings_s.append(healing_s)
    say(f"routes again after p50 {percentile(healings_s, 50):.2f} s, longest {max(healings_s):.2f} s; "
        f"limit {MAX_HEALING_S:.1f} s")  # fmt: skip
    return figures.conclude(MAX_STALL_S)


async def _run(
    stack: RunningStack, rng: random.Random, figures: Figures, undisturbed: Sequence[Answer], what: str
) -> float:
    is_over = asyncio.Event()
    answers: list[tuple[Answer, Answer]] = []

    async def ask_on(rng: random.Random) -> None:
        while not is_over.is_set():
            expected = rng.choice(undisturbed)
            answers.append((Answer(expected.question), expected))
            await listen(stack.client, answers[-1][0])

    asking = [asyncio.create_task(ask_on(random.Random(rng.random()))) for _ in range(_NUM_STREAMS)]
    await asyncio.sleep(0)  # each asks its first question
    await until_tokens(answers[0][0], rng.randint(1, 64), asking[0])
    broken_s = time.monotonic()
    await _FAULTS[what](stack)
    restored_s = time.monotonic()
    await _until_all_is_served(stack)
    healing_s = time.monotonic() - restored_s - PAUSES.num_seconds(restored_s)
    is_over.set()
    await asyncio.gather(*asking)
    for answer, expected in answers:
        answer.compare(expected, figures)
    stalls_s = [answer.longest_wait_s(broken_s) for answer, _ in answers]
    figures.stalls_s += stalls_s
    say(f"run {figures.num_runs}: {what} for {restored_s - broken_s:.1f} s; {len(answers)} streams, longest wait "
        f"{max(stalls_s):.2f} s; routes again after {healing_s:.2f} s")  # fmt: skip
    await stack.until_whole()
    return healing_s


async def _until_all_is_served(stack: RunningStack) -> None:
    """Until the router gives out chains, and a conversation goes through two turns."""
    give_up_s = time.monotonic() + _GIVE_UP_S
    while True:
        placement = await asyncio.to_thread(stack.local.placement)
        try:
            if placement is not None and placement.HasField("cheapest_chain"):
                async with stack.client.session() as session:
                    for _ in range(2):
                        await session.generate("the thin man", max_tokens=4)
                return
        except CorollaError:
            pass
        if time.monotonic() > give_up_s:
            return
        await asyncio.sleep(0.05)


Fault = Callable[[RunningStack], Awaitable[None]]


async def _freeze(stack: RunningStack) -> None:
    stack.local.kill("redis", signal.SIGSTOP)
    await asyncio.sleep(stack.outage_s)
    stack.local.kill("redis", signal.SIGCONT)


async def _flush(stack: RunningStack) -> None:
    await _tell(stack, "FLUSHALL")


async def _fill(stack: RunningStack) -> None:
    await _tell(stack, "CONFIG", "SET", "maxmemory", "1kb")
    await asyncio.sleep(stack.outage_s)
    await _tell(stack, "CONFIG", "SET", "maxmemory", "0")


async def _kill(stack: RunningStack, name: str, *, stays_away: bool) -> None:
    process = stack.process(name)
    pid = stack.local.pid(name)
    stack.kill(process)
    await until(lambda: stack.local.pid(name) != pid)
    if stays_away:
        await asyncio.sleep(stack.outage_s)
    stack.local.launch(process)


async def _tell(stack: RunningStack, *command: str) -> None:
    async with Redis.from_url(stack.local.redis_url) as client:
        await client.execute_command(*command)  # type: ignore[no-untyped-call]


_FAULTS: dict[str, Fault] = {
    "redis frozen": _freeze,
    "redis flushed": _flush,
    "redis restarted empty": partial(_kill, name="redis", stays_away=False),
    "redis away": partial(_kill, name="redis", stays_away=True),
    "redis full": _fill,
    "router restarted": partial(_kill, name="router", stays_away=False),
    "router away": partial(_kill, name="router", stays_away=True),
}
