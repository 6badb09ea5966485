"""kill -9 of a client service in mid-answer: its callers go on at another one, with just the missing tokens."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from corolla.sdk.async_client import AsyncClient
from tests.faults.figures import Figures, say
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens

MAX_STALL_S = 3.0


async def client_service(stand: Stand, rng: random.Random, num_runs: int) -> int:
    """Of each run: 1 to 4 streams, of which half are turns of sessions; the two services die in turn."""
    figures = Figures()
    services = [stand.service, await stand.add_service()]
    for number in range(num_runs):
        figures.num_runs += 1
        victim, other = services[number % 2], services[1 - number % 2]
        async with AsyncClient(victim.address) as first, AsyncClient(other.address) as second:
            await _run(stand, rng, figures, victim.name, first, second)
        stand.stack.launch(victim)
        await stand.until_serving(victim)
        # What hops hold of a turn that went on elsewhere makes room for others, and ends with its lease.
        await stand.until_whole(is_idle=False)
    return figures.conclude(MAX_STALL_S)


async def _run(
    stand: Stand, rng: random.Random, figures: Figures, victim: str, first: AsyncClient, second: AsyncClient
) -> None:
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(96, 128)) for _ in range(rng.randint(1, 4))]
    names = [f"{rng.getrandbits(128):032x}" for _ in questions]
    expected = await _ask(second, questions, [await _place(second, number, name) for number, name in enumerate(names)])
    places = [await _place(first, number, name) for number, name in enumerate(names)]
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(first, answer, **place)) for answer, place in zip(answers, places, strict=True)]
    await until_tokens(answers[0], at := rng.randint(1, questions[0].max_tokens - 8), tasks[0])
    killed_s = time.monotonic()
    stand.stack.kill(victim)
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
        figures.check(whole.failure is None, f"the undisturbed answer failed: {whole.failure}")
        figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
        figures.check(answer.token_ids == whole.token_ids, "the tokens are not those of the undisturbed answer")
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
    say(f"run {figures.num_runs}: {victim} killed at token {at} of {len(answers)} streams; {len(broken)} resumed, "
        f"longest stall {max(stalls, default=0):.2f} s")  # fmt: skip


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
