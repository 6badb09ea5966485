"""SIGSTOP of a hop for ten seconds: its streams continue on other servers, and its late results change no token."""

import asyncio
import random
import signal
import time

from tests.faults.figures import Figures, say
from tests.faults.long_answers import LongAnswers, LongRepertoire
from tests.faults.running_stack import RunningStack

MAX_STALL_S = 4.0


async def freeze(stack: RunningStack, rng: random.Random, runs: range, frozen_s: float = 10.0) -> int:
    """Each run has two streams that outlast the frozen time, and one frozen server."""
    figures, repertoire = Figures(), LongRepertoire(stack, rng)
    for number in runs:
        figures.num_runs += 1
        await _run(repertoire, rng, figures, stack.spans[number % len(stack.spans)], frozen_s)
    return figures.conclude(MAX_STALL_S)


async def _run(repertoire: LongRepertoire, rng: random.Random, figures: Figures, span: str, frozen_s: float) -> None:
    stack = repertoire.stack
    answers = await LongAnswers.begin(repertoire, rng)
    victim = await stack.busiest(span)
    num_hit = (await stack.status(victim)).num_running_sessions
    frozen_at_s = time.monotonic()
    stack.kill(victim, signal.SIGSTOP)
    await asyncio.sleep(frozen_s)
    stack.kill(victim, signal.SIGCONT)
    num_tokens = await answers.end(figures)
    waits = sorted(answers.longest_waits_s(frozen_at_s), reverse=True)[:num_hit]
    figures.stalls_s += waits
    await answers.compare(figures)
    say(f"run {figures.num_runs}: server of {span} frozen for {frozen_s:.0f} s with {num_hit} sessions; "
        f"{num_tokens} tokens, longest stall {max(waits, default=0):.2f} s")  # fmt: skip
