"""One of two replicas dies with 64 live sessions: all recover, within a budget of replayed tokens."""

import asyncio
import random
import time

from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, Repertoire, listen, until_tokens

NUM_SESSIONS = 64
MAX_STALL_S = 15.0
_MAX_TOKENS = 160
_NUM_QUESTIONS = 8


async def herd(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has 64 streams, and the busier server of a span is killed in their midst."""
    figures = Figures()
    repertoire = Repertoire(stack.client)
    questions = [Question.draw(rng, rng.randint(1, 20), _MAX_TOKENS) for _ in range(_NUM_QUESTIONS)]
    await repertoire.undisturbed(questions)
    for number in runs:
        figures.num_runs += 1
        span = stack.spans[number % len(stack.spans)]
        await _run(stack, rng, figures, repertoire, [rng.choice(questions) for _ in range(NUM_SESSIONS)], span)
    return figures.conclude(MAX_STALL_S)


async def _run(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    repertoire: Repertoire,
    questions: list[Question],
    span: str,
) -> None:
    undisturbed = await repertoire.undisturbed(questions)
    answers = [Answer(question) for question in questions]
    recomputed_before = await stack.metric("corolla_recomputed_tokens_total")
    tasks = [asyncio.create_task(listen(stack.client, answer)) for answer in answers]
    await asyncio.gather(*(until_tokens(answer, 8, task) for answer, task in zip(answers, tasks, strict=True)))
    await until_tokens(answers[0], rng.randint(8, _MAX_TOKENS // 2), tasks[0])
    victim = await stack.busiest(span)
    num_hit = (await stack.status(victim)).num_running_sessions
    killed_s = time.monotonic()
    stack.kill(victim)
    await asyncio.gather(*tasks)
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    hit = [answer for answer in answers if answer.was_hit]
    figures.check(len(hit) >= NUM_SESSIONS // 4, f"only {len(hit)} streams were hit")
    figures.check(
        all(answer.usage.recoveries == 1 for answer in hit if answer.usage is not None), "a stream recovered twice"
    )
    survivors = [server for server in stack.servers if server.name != victim.name]
    alive = [stack.local.pid(server.name) is not None for server in survivors]
    figures.check(all(alive), "another server died, too")
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    num_recomputed = await stack.metric("corolla_recomputed_tokens_total") - recomputed_before
    say(f"run {figures.num_runs}: server of {span} killed with {num_hit} of {NUM_SESSIONS} sessions; {len(hit)} "
        f"recovered, {num_recomputed:.0f} tokens recomputed, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(victim)
