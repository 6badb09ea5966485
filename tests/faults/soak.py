"""A fault every 20 seconds, for a chosen time: no wrong token, no growth of memory or descriptors.

Three runs are a minute. A few minutes cannot tell a leak from a warm-up, so sizes are only checked in long runs.
"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, Repertoire, listen

MAX_STALL_S = 4.0
MAX_RSS_SLOPE = 0.02
_FAULT_INTERVAL_S = 20.0
_SAMPLE_INTERVAL_S = 2.0
_MIN_QUARTER_S = 120.0
_NUM_STREAMS = 4
_NUM_QUESTIONS = 12
# Whose sizes are watched. That server is never killed: a process that was started again tells nothing of a leak.
_WATCHED = ("client", "router", "server-1")


@dataclass
class _Sizes:
    """Resident bytes and open descriptors of one process over time."""

    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)


async def soak(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """A fault for each run, one every 20 seconds: a server killed or frozen, or callers that leave."""
    figures = Figures()
    repertoire = Repertoire(stack.client)
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(64, 256)) for _ in range(_NUM_QUESTIONS)]
    began_s = time.monotonic()
    undisturbed = {answer.question: answer for answer in await repertoire.undisturbed(questions)}
    is_over = asyncio.Event()
    sizes = {name: _Sizes() for name in _WATCHED}
    answers: list[Answer] = []

    async def ask_on(rng: random.Random) -> None:
        while not is_over.is_set():
            answers.append(Answer(rng.choice(questions)))
            await listen(stack.client, answers[-1])

    working = [asyncio.create_task(ask_on(random.Random(rng.random()))) for _ in range(_NUM_STREAMS)]
    working.append(asyncio.create_task(_measure(stack, sizes, is_over)))
    for _ in runs:
        figures.num_runs += 1
        began_s = time.monotonic()
        what = await _break(stack, rng)
        await asyncio.sleep(max(0.0, _FAULT_INTERVAL_S - (time.monotonic() - began_s)))
        done = [each for each in answers if each.usage is not None or each.failure is not None]
        answers[:] = [each for each in answers if each not in done]
        _check(figures, done, undisturbed, began_s)
        say(f"run {figures.num_runs}: {what}; {len(done)} answers, longest wait so far {max(figures.stalls_s):.2f} s")
    is_over.set()
    await asyncio.gather(*working)
    _check(figures, answers, undisturbed, began_s)
    for name, each in sizes.items():
        _check_sizes(figures, name, each)
    await stack.until_whole()
    return figures.conclude(MAX_STALL_S)


def _check(figures: Figures, answers: Sequence[Answer], undisturbed: dict[Question, Answer], since_s: float) -> None:
    for answer in answers:
        answer.compare(undisturbed[answer.question], figures)
        figures.stalls_s.append(answer.longest_wait_s(since_s))


async def _break(stack: RunningStack, rng: random.Random) -> str:
    victim = await stack.busiest(rng.choice(stack.spans))
    what = "frozen" if victim.name in _WATCHED else rng.choice(("killed", "frozen"))
    if what == "killed":
        stack.kill(victim)
        await stack.until_gone(victim)
        stack.local.launch(victim)
    else:
        stack.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(_FAULT_INTERVAL_S / 4)
        stack.kill(victim, signal.SIGCONT)
    await stack.until_whole(is_idle=False)
    return f"server of {victim.blocks} {what}"


async def _measure(stack: RunningStack, sizes: dict[str, _Sizes], is_over: asyncio.Event) -> None:
    processes = {name: psutil.Process(stack.local.pid(name)) for name in sizes}
    while not is_over.is_set():
        for name, process in processes.items():
            sizes[name].rss.append(process.memory_info().rss)
            sizes[name].descriptors.append(process.num_fds())
        await asyncio.sleep(_SAMPLE_INTERVAL_S)


def _check_sizes(figures: Figures, name: str, sizes: _Sizes) -> None:
    """Compares the mean of the last quarter with that of the quarter after the warm-up."""
    quarter = len(sizes.rss) // 4
    if quarter * _SAMPLE_INTERVAL_S < _MIN_QUARTER_S:
        return
    rss = [sum(part) / quarter for part in (sizes.rss[quarter : 2 * quarter], sizes.rss[-quarter:])]
    slope = rss[1] / rss[0] - 1
    peaks = [max(part) for part in (sizes.descriptors[quarter : 2 * quarter], sizes.descriptors[-quarter:])]
    say(f"{name}: {rss[1] / 2**20:.0f} MiB, {100 * slope:+.1f} %; descriptors at most {peaks[0]}, then {peaks[1]}")
    figures.check(slope <= MAX_RSS_SLOPE, f"{name} grew by {100 * slope:.1f} %")
    figures.check(peaks[1] <= peaks[0] + 4, f"{name} had {peaks[0]} descriptors open, and then {peaks[1]}")
