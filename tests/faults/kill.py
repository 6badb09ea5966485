"""kill -9 of each hop at a random token: every stream continues with the tokens of the undisturbed one.

In one run of four a server of another span dies as well: at the same moment, or while the first one is being replaced.
"""

import asyncio
import random
import time

from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Repertoire, listen, until_tokens

MAX_STALL_S = 2.0


async def kill(stack: RunningStack, rng: random.Random, runs: range, max_streams: int = 4) -> int:
    """Each run has 1 to `max_streams` streams, of up to 256 tokens or behind `stack.context`, and one killed server."""
    figures = Figures()
    repertoire = Repertoire(stack.client, stack.context)
    for number in runs:
        figures.num_runs += 1
        await _run(stack, rng, figures, repertoire, number % len(stack.spans), max_streams)
    return figures.conclude(MAX_STALL_S)


async def _run(
    stack: RunningStack, rng: random.Random, figures: Figures, repertoire: Repertoire, lost_hop: int, max_streams: int
) -> None:
    span = stack.spans[lost_hop]
    questions = [
        repertoire.draw(rng, rng.randint(1, 20), rng.randint(96, 128)) for _ in range(rng.randint(1, max_streams))
    ]
    undisturbed = await repertoire.undisturbed(questions)
    counted_before = await _counted(stack)
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(stack.client, answer)) for answer in answers]
    watched = rng.randrange(len(answers))
    await until_tokens(answers[watched], at := rng.randint(0, questions[watched].max_tokens - 8), tasks[watched])
    victims = [await stack.busiest(span)]
    if rng.random() < 0.25:
        victims.append(await stack.busiest(rng.choice([other for other in stack.spans if other != span])))
    # What is not open yet is counted nowhere, and may be hit all the same.
    num_hit = len(victims) * len(answers)
    if all(answer.token_ids for answer in answers):
        num_hit = sum([(await stack.status(victim)).num_running_sessions for victim in victims])
    pause_s = rng.choice((0.0, rng.uniform(0, 0.1)))
    killed_s = time.monotonic()
    for number, victim in enumerate(victims):
        await asyncio.sleep(number * pause_s)
        stack.kill(victim)
    await asyncio.gather(*tasks)
    num_recoveries, num_by_outputs, num_recomputed = (
        after - before for after, before in zip(await _counted(stack), counted_before, strict=True)
    )
    hit = [answer for answer in answers if answer.was_hit]
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    # Those that ended in the meantime needed none.
    figures.check(num_recoveries <= num_hit, f"{num_recoveries:.0f} recoveries, but {num_hit} sessions were hit")
    num_reported = sum(answer.usage.recoveries for answer in hit if answer.usage is not None)
    figures.check(num_reported == num_recoveries, "what the callers learn of recoveries is not what is counted")
    if len(victims) == 1 and hit:
        longest = max(answer.usage.prompt_tokens + len(answer.token_ids) for answer in hit if answer.usage is not None)
        # Where an earlier hop kept its outputs, only the lost span computes; else all hops up to it.
        num_passes = num_by_outputs + (num_recoveries - num_by_outputs) * (lost_hop + 1)
        figures.check(0 < num_recomputed <= num_passes * longest, f"{num_recomputed:.0f} tokens were computed again")
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    blocks = " and ".join(victim.blocks for victim in victims)
    say(f"run {figures.num_runs}: {len(answers)} streams, server of {blocks} killed at token {at}; "
        f"{len(hit)} recovered, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(*victims)


async def _counted(stack: RunningStack) -> tuple[float, float, float]:
    """Recoveries so far, those among them by boundary activations alone, and the tokens computed again."""
    return (
        await stack.metric("corolla_session_recoveries_total"),
        await stack.metric("corolla_session_recoveries_total", method="outputs"),
        await stack.metric("corolla_recomputed_tokens_total"),
    )
