"""kill -9 of each hop at a random token: every stream goes on, and gives the tokens of the undisturbed one.

In one run of four a server of another span dies as well: at the same moment, or while the first one is being replaced.
"""

import asyncio
import random
import time

from tests.faults.figures import Figures, say
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_STALL_S = 2.0
CONTEXT_TOKENS = 256


async def kill(stand: Stand, rng: random.Random, num_runs: int, max_streams: int = 4) -> int:
    """Of each run: 1 to `max_streams` streams of up to 256 tokens of context, and one server killed."""
    figures = Figures()
    for number in range(num_runs):
        figures.num_runs += 1
        await _run(stand, rng, figures, stand.spans[number % len(stand.spans)], max_streams)
    return figures.conclude(MAX_STALL_S)


async def _run(stand: Stand, rng: random.Random, figures: Figures, span: str, max_streams: int) -> None:
    questions = [
        Question.draw(rng, rng.randint(1, 20), rng.randint(96, 128)) for _ in range(rng.randint(1, max_streams))
    ]
    undisturbed = [Answer(question) for question in questions]
    await asyncio.gather(*(listen(stand.client, answer) for answer in undisturbed))
    recoveries_before = await stand.metric("corolla_session_recoveries_total")
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(stand.client, answer)) for answer in answers]
    watched = rng.randrange(len(answers))
    await until_tokens(answers[watched], at := rng.randint(0, questions[watched].max_tokens - 8), tasks[watched])
    victims = [await stand.busiest(span)]
    if rng.random() < 0.25:
        victims.append(await stand.busiest(rng.choice([other for other in stand.spans if other != span])))
    num_hit = sum([(await stand.status(victim)).num_sessions for victim in victims])
    pause_s = rng.choice((0.0, rng.uniform(0, 0.1)))
    killed_s = time.monotonic()
    for number, victim in enumerate(victims):
        await asyncio.sleep(number * pause_s)
        stand.kill(victim)
    await asyncio.gather(*tasks)
    num_recoveries = await stand.metric("corolla_session_recoveries_total") - recoveries_before
    hit = [answer for answer in answers if answer.usage is not None and answer.usage.recoveries]
    for answer, expected in zip(answers, undisturbed, strict=True):
        figures.check(expected.failure is None, f"the undisturbed answer failed: {expected.failure}")
        figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
        figures.check(answer.token_ids == expected.token_ids, "the tokens are not those of the undisturbed answer")
    # Those that ended in the meantime needed none.
    figures.check(num_recoveries <= num_hit, f"{num_recoveries:.0f} recoveries, but {num_hit} sessions were hit")
    told = sum(answer.usage.recoveries for answer in hit if answer.usage is not None)
    figures.check(told == num_recoveries, "what the callers learn of recoveries is not what is counted")
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    blocks = " and ".join(victim.blocks for victim in victims)
    say(f"run {figures.num_runs}: {len(answers)} streams, server of {blocks} killed at token {at}; "
        f"{len(hit)} recovered, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    await stand.restart(*victims)
