"""kill -9 of all servers of a span: a server that keeps its weights takes it over, and every answer goes on."""

import asyncio
import random
import time
from dataclasses import replace
from typing import Final

from corolla.local.processes import ManagedProcess
from corolla.v1 import router_pb2
from corolla.wire.span import Span
from tests.faults.figures import Figures, say
from tests.faults.running_stack import NUM_BLOCKS, RunningStack
from tests.faults.streams import Answer, Repertoire, listen, until_tokens
from tests.integration.waiting import until

MAX_STALL_S: Final = 3.0
_NUM_STREAMS: Final = 4
_MAX_TOKENS: Final = 256
_SETTINGS: Final = {"COROLLA_SPARE_MIB": "4096"}


async def takeover(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """One server of the first span chooses its blocks, and keeps those of the others.

    Each run has four streams, and all servers of the other span die. The router moves the spare back to where it is
    needed most once they have returned.
    """
    figures = Figures()
    repertoire = Repertoire(stack.client, stack.context)
    given = next(server for server in stack.servers if server.blocks == stack.spans[0])
    spare = without_blocks(given)
    await stack.end(given)
    stack.local.launch(spare, _SETTINGS)
    for _ in runs:
        figures.num_runs += 1
        await _run(stack, spare, rng, figures, repertoire)
    await stack.end(spare)
    await stack.restart(given)
    return figures.conclude(MAX_STALL_S)


def without_blocks(server: ManagedProcess) -> ManagedProcess:
    """The server as one that goes where the router wants it."""
    at = server.arguments.index("--blocks")
    blocks = ("--blocks", "auto", "--capacity-blocks", str(NUM_BLOCKS // 2))
    return replace(server, arguments=(*server.arguments[:at], *blocks, *server.arguments[at + 2 :]))


async def _run(
    stack: RunningStack, spare: ManagedProcess, rng: random.Random, figures: Figures, repertoire: Repertoire
) -> None:
    span = stack.spans[-1]
    victims = [server for server in stack.servers if server.blocks == span]
    questions = [repertoire.draw(rng, rng.randint(1, 20), _MAX_TOKENS) for _ in range(_NUM_STREAMS)]
    await until(lambda: _keeps(stack, spare, span), 60)
    undisturbed = await repertoire.undisturbed(questions)
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(stack.client, answer)) for answer in answers]
    await asyncio.gather(*(until_tokens(answer, 1, task) for answer, task in zip(answers, tasks, strict=True)))
    await until_tokens(answers[0], at := rng.randint(1, _MAX_TOKENS // 2), tasks[0])
    killed_s = time.monotonic()
    for victim in victims:
        stack.kill(victim)
    await asyncio.gather(*tasks)
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    hit = [answer for answer in answers if answer.was_hit]
    figures.check(bool(hit), "no stream was hit")
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: the servers of {span} killed at token {at}; {len(hit)} recovered, longest stall "
        f"{max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(*victims)


async def _keeps(stack: RunningStack, spare: ManagedProcess, span: str) -> bool:
    """The spare keeps a span, and holds another one that a second server holds, too."""
    placement = await asyncio.to_thread(stack.local.placement)
    ready = [
        each
        for each in (placement.servers if placement is not None else ())
        if each.state == router_pb2.SERVER_STATE_READY and not each.suspected
    ]
    held = [str(Span.from_message(each.span)) for each in ready]
    return any(
        each.server.address == spare.address
        and own != span
        and held.count(own) > 1
        and span in {str(Span.from_message(kept)) for kept in each.load.spare_spans}
        for each, own in zip(ready, held, strict=True)
    )
