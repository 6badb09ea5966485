"""kill -9 of a client service in the middle of answers: its callers resume elsewhere and get the missing tokens."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from corolla.chassis import failpoints
from corolla.local.processes import ManagedProcess
from corolla.sdk.async_client import AsyncClient
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_STALL_S = 3.0
# So many tokens may be on their way to a caller that is held up; an answer of which all have left is not hit.
_TOKENS_UNDER_WAY = 128
_MOST_TRIES = 5
# The last moments at which a turn is not the session's yet, and is, but its caller does not know.
_PLACES = ("before_commit", "after_commit")


async def client_service(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has 1 to 4 streams, of which half are turns of sessions; the two services die in turn.

    Every third one dies as it writes a turn back.
    """
    figures = Figures()
    services = [stack.service, await stack.add_service()]
    for number in runs:
        figures.num_runs += 1
        victim, other = services[number % 2], services[1 - number % 2]
        dies_at = _PLACES[number // 3 % 2] if number % 3 == 2 else ""
        num_hit = 0
        # All answers of a caller that is behind may have left the service before it dies.
        for _ in range(_MOST_TRIES):
            if num_hit := await _lose(stack, rng, figures, victim, other, dies_at):
                break
        figures.check(num_hit > 0, "no stream was hit")
    return figures.conclude(MAX_STALL_S)


async def _lose(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    victim: ManagedProcess,
    other: ManagedProcess,
    dies_at: str,
) -> int:
    """The victim dies and comes back. Returns how many streams were hit."""
    async with AsyncClient(victim.address) as first, AsyncClient(other.address) as second:
        if dies_at:
            stack.kill(victim)
            await stack.until_gone(victim)
            stack.local.launch(victim, {failpoints.VARIABLE: dies_at})
            await stack.until_serving(victim)
        num_hit = await _run(stack, rng, figures, victim.name, dies_at, first, second)
    await stack.until_gone(victim)
    stack.local.launch(victim)
    await stack.until_serving(victim)
    # What hops hold of a turn that went on elsewhere makes room for others, and ends with its lease.
    await stack.until_whole(is_idle=False)
    return num_hit


async def _run(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    victim: str,
    dies_at: str,
    first: AsyncClient,
    second: AsyncClient,
) -> int:
    """Returns how many streams were hit."""
    num_streams = rng.randint(2 if dies_at else 1, 4)
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(240, 300)) for _ in range(num_streams)]
    names = [f"{rng.getrandbits(128):032x}" for _ in questions]
    expected = await _ask(second, questions, [await _place(second, number, name) for number, name in enumerate(names)])
    places = [await _place(first, number, name) for number, name in enumerate(names)]
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(first, answer, **place)) for answer, place in zip(answers, places, strict=True)]
    killed_s = time.monotonic()
    if not dies_at:
        last = questions[0].max_tokens - _TOKENS_UNDER_WAY
        await until_tokens(answers[0], rng.randint(1, last), tasks[0])
        killed_s = time.monotonic()
        stack.local.kill(victim)
    await asyncio.gather(*tasks)
    broken = [(answer, place) for answer, place in zip(answers, places, strict=True) if answer.failure is not None]
    # What the caller has it either sends along, or only counts.
    received: list[Any] = [
        list(answer.token_ids) if rng.random() < 0.7 else len(answer.token_ids) for answer, _ in broken
    ]
    await asyncio.gather(
        *(
            listen(second, answer, **place, resume_from=has)
            for (answer, place), has in zip(broken, received, strict=True)
        )
    )
    for answer, whole in zip(answers, expected, strict=True):
        answer.compare(whole, figures)
    for place in places:
        if "session" in place:
            info = await second.get_session(place["session"])
            figures.check(info.num_turns == 1 and not info.busy, f"the session has {info.num_turns} turns")
            await second.delete_session(place["session"])
    stalls = [
        answer.longest_wait_s(killed_s)
        for (answer, _), has in zip(broken, received, strict=True)
        # Where the tokens are made again, the caller waits for as long as they took.
        if isinstance(has, list)
    ]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: {victim} killed {dies_at.replace('_', ' ')} with {len(answers)} streams; "
        f"{len(broken)} resumed, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    return len(broken)


async def _place(client: AsyncClient, number: int, name: str) -> dict[str, Any]:
    place: dict[str, Any] = {"request_id": name}
    if number % 2:
        place["session"] = (await client.create_session()).session_id
    return place


async def _ask(client: AsyncClient, questions: Sequence[Question], places: Sequence[dict[str, Any]]) -> list[Answer]:
    """The undisturbed answers; their sessions are gone afterwards."""
    answers = [Answer(question) for question in questions]
    await asyncio.gather(*(listen(client, answer, **place) for answer, place in zip(answers, places, strict=True)))
    for place in places:
        if "session" in place:
            await client.delete_session(place["session"])
    return answers
