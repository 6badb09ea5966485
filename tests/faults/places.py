"""A server dies at each named place of its work: in the middle of an open, an iteration, a message, a heartbeat."""

import asyncio
import random
import signal
import time
from typing import get_args

from corolla.chassis import failpoints
from corolla.local.processes import ManagedProcess
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, Repertoire, listen

MAX_STALL_S = 2.0
_NUM_QUESTIONS = 8
_NUM_STREAMS = 4
_GIVE_UP_S = 60.0
# Turns are written back by client services, which have a row of their own.
PLACES = [place for place in get_args(failpoints.Place) if "commit" not in place]


async def places(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """In each run streams follow each other until a server has died at the next place."""
    figures = Figures()
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(32, 96)) for _ in range(_NUM_QUESTIONS)]
    repertoire = Repertoire(stack.client)
    await repertoire.undisturbed(questions)
    for number in runs:
        figures.num_runs += 1
        round_number, place_number = divmod(number, len(PLACES))
        span = stack.spans[(round_number + place_number) % len(stack.spans)]
        victim = rng.choice([server for server in stack.servers if server.blocks == span])
        await _run(stack, rng, figures, repertoire, questions, victim, PLACES[place_number])
    return figures.conclude(MAX_STALL_S)


async def _run(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    repertoire: Repertoire,
    questions: list[Question],
    victim: ManagedProcess,
    place: str,
) -> None:
    count = rng.randint(1, 40) if place.endswith(("forward", "send")) else rng.randint(1, 3)
    stack.kill(victim)
    await stack.until_gone(victim)
    stack.local.launch(victim, {failpoints.VARIABLE: f"{place}:{1 if 'deregister' in place else count}"})
    await stack.until_started(victim)
    started_s = time.monotonic()
    answers: list[Answer] = []

    async def ask_on(rng: random.Random) -> None:
        while stack.local.pid(victim.name) is not None and time.monotonic() < started_s + _GIVE_UP_S:
            answers.append(Answer(rng.choice(questions)))
            await listen(stack.client, answers[-1])

    asking = [asyncio.create_task(ask_on(random.Random(rng.random()))) for _ in range(_NUM_STREAMS)]
    if "deregister" in place:
        await stack.until_serving(victim)
        stack.kill(victim, signal.SIGTERM)
    await asyncio.gather(*asking)
    figures.check(stack.local.pid(victim.name) is None, f"the server did not get {place}")
    undisturbed = await repertoire.undisturbed([answer.question for answer in answers])
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    hit = [answer for answer in answers if answer.was_hit]
    stalls = [answer.longest_wait_s(started_s) for answer in hit]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: server of {victim.blocks} died {place.replace('_', ' ')}; {len(answers)} answers, "
        f"{len(hit)} recovered, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(victim)
