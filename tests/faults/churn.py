"""Servers leave and join again under 8 streams, a third of them by kill -9: no error, no wrong token, and no ghost.

A ghost is a server that the placement still lists seven seconds after its process ended.
"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from typing import Final

from tests.faults.drain import ask_again
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen

NUM_STREAMS: Final = 8
GHOST_S: Final = 7.0
"""The time of a lease, and a second for the router to look."""
_PAUSE_S: Final = 0.5
# One server of each of two spans leaves at once in some runs. In one run of five, servers stay away until they would be
# ghosts; otherwise their next incarnations take their addresses.
_SHARE_OF_TWO: Final = 0.2
_LONG_ABSENCE: Final = 5


async def churn(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """In each run one server or two leave, and join again."""
    figures = Figures()
    questions = [Question.draw(rng, rng.randint(1, 20), rng.randint(100, 200)) for _ in range(NUM_STREAMS)]
    undisturbed = [Answer(question) for question in questions]
    await asyncio.gather(*(listen(stack.client, answer) for answer in undisturbed))
    is_over, began_s = asyncio.Event(), time.monotonic()
    streams = [asyncio.create_task(ask_again(stack, question, is_over)) for question in questions]
    num_left = 0
    async with asyncio.TaskGroup() as looks:
        for number in runs:
            figures.num_runs += 1
            gone = await _run(stack, rng, figures, number)
            num_left += len(gone)
            looks.create_task(_look_for_ghosts(stack, figures, gone, figures.num_runs))
        is_over.set()
    took_s = time.monotonic() - began_s
    num_answers, longest_s = 0, 0.0
    for expected, answers in zip(undisturbed, await asyncio.gather(*streams), strict=True):
        num_answers += len(answers)
        for answer in answers:
            answer.compare(expected, figures)
            longest_s = max(longest_s, answer.longest_wait_s(began_s))
    say(f"{num_left} servers left and {num_left} joined in {took_s:.0f} s, under {num_answers} answers; "
        f"longest wait {longest_s:.2f} s")  # fmt: skip
    await stack.until_whole()
    return figures.conclude(0.0)


async def _run(stack: RunningStack, rng: random.Random, figures: Figures, number: int) -> Sequence[str]:
    """Returns the ids of the servers that left."""
    is_kill = number % 3 == 0
    away_s = GHOST_S + _PAUSE_S if number % _LONG_ABSENCE == _LONG_ABSENCE - 1 else rng.uniform(0, _PAUSE_S)
    spans = rng.sample(stack.spans, 2 if rng.random() < _SHARE_OF_TWO else 1)
    leaving = [rng.choice([server for server in stack.servers if server.blocks == span]) for span in spans]
    placed = await asyncio.to_thread(_placed, stack)
    ids = [placed[server.address] for server in leaving if server.address in placed]
    figures.check(len(ids) == len(leaving), "the placement lacks a server that serves")
    for server in leaving:
        stack.kill(server, signal.SIGKILL if is_kill else signal.SIGTERM)
    await asyncio.gather(*map(stack.until_gone, leaving))
    say(f"run {figures.num_runs}: {' and '.join(server.name for server in leaving)} "
        f"{'killed' if is_kill else 'left'}")  # fmt: skip
    await asyncio.sleep(away_s)
    await stack.restart(*leaving, is_idle=False)
    return ids


async def _look_for_ghosts(stack: RunningStack, figures: Figures, gone: Sequence[str], number: int) -> None:
    await asyncio.sleep(GHOST_S)
    listed = await asyncio.to_thread(_placed, stack)
    figures.check(bool(listed), f"the router lists no server after run {number}")
    figures.check(not {*listed.values()}.intersection(gone), f"servers that left in run {number} are still listed")


def _placed(stack: RunningStack) -> dict[str, str]:
    """The ids of the servers that the router lists, by address."""
    placement = stack.local.placement()
    return {each.server.address: each.server.server_id for each in (placement.servers if placement else ())}
