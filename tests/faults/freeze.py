"""SIGSTOP of a hop for ten seconds: the streams go on elsewhere, and what it says when it wakes reaches none."""

import asyncio
import random
import signal
import time

from tests.faults.figures import Figures, say
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_STALL_S = 4.0
_MAX_TOKENS = 7000


async def freeze(stand: Stand, rng: random.Random, num_runs: int, frozen_s: float = 10.0) -> int:
    """Of each run: two streams that outlast the frozen time, and one server frozen."""
    figures = Figures()
    for number in range(num_runs):
        figures.num_runs += 1
        await _run(stand, rng, figures, stand.spans[number % len(stand.spans)], frozen_s)
    return figures.conclude(MAX_STALL_S)


async def _run(stand: Stand, rng: random.Random, figures: Figures, span: str, frozen_s: float) -> None:
    answers = [Answer(Question.draw(rng, 4, _MAX_TOKENS)) for _ in range(2)]
    tasks = [asyncio.create_task(listen(stand.client, answer)) for answer in answers]
    await until_tokens(answers[0], rng.randint(2, 60), tasks[0])
    victim = await stand.busiest(span)
    num_hit = (await stand.status(victim)).num_sessions
    frozen_at_s = time.monotonic()
    stand.kill(victim, signal.SIGSTOP)
    await asyncio.sleep(frozen_s)
    stand.kill(victim, signal.SIGCONT)
    num_tokens_before = [len(answer.token_ids) for answer in answers]
    await asyncio.sleep(1.5)
    num_tokens = [len(answer.token_ids) for answer in answers]
    went_on = [
        task.done() or after > before for task, before, after in zip(tasks, num_tokens_before, num_tokens, strict=True)
    ]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await stand.until_whole()
    waits = sorted((answer.longest_wait_s(frozen_at_s) for answer in answers), reverse=True)[:num_hit]
    figures.stalls_s += waits
    figures.check(all(went_on), "a stream stands still after the server woke")
    undisturbed = [
        Answer(Question(answer.question.prompt, len(answer.token_ids), answer.question.options)) for answer in answers
    ]
    await asyncio.gather(*(listen(stand.client, answer) for answer in undisturbed))
    for answer, expected in zip(answers, undisturbed, strict=True):
        figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
        figures.check(answer.token_ids == expected.token_ids, "the tokens are not those of the undisturbed answer")
    say(f"run {figures.num_runs}: server of {span} frozen for {frozen_s:.0f} s with {num_hit} sessions; "
        f"{num_tokens} tokens, longest stall {max(waits, default=0):.2f} s")  # fmt: skip
