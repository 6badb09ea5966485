"""kill -9 of the only server of a span: a server that keeps its weights takes it over, and every answer goes on."""

import asyncio
import random
import time
from typing import Final

from corolla.local.processes import ManagedProcess
from corolla.v1 import router_pb2
from corolla.wire.span import Span
from tests.faults.figures import Figures, say
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Repertoire, listen, until_tokens
from tests.integration.waiting import until

ENVIRONMENT: Final = {
    "COROLLA_SPARE_MIB": "4096",
    # The servers are alike, and share two cores with other rows: what they measure must not move any of them.
    "COROLLA_REBALANCE_MIN_GAIN": "10",
}
MAX_STALL_S = 3.0
_NUM_STREAMS: Final = 4
_MAX_TOKENS: Final = 256


async def takeover(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has four streams; servers choose their blocks, one more than the model needs."""
    figures = Figures()
    repertoire = Repertoire(stack.client, stack.context)
    for _ in runs:
        figures.num_runs += 1
        await _run(stack, rng, figures, repertoire)
    return figures.conclude(MAX_STALL_S)


async def _run(stack: RunningStack, rng: random.Random, figures: Figures, repertoire: Repertoire) -> None:
    questions = [repertoire.draw(rng, rng.randint(1, 20), _MAX_TOKENS) for _ in range(_NUM_STREAMS)]
    undisturbed = await repertoire.undisturbed(questions)
    victim, span = await _with_spare(stack)
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(stack.client, answer)) for answer in answers]
    await asyncio.gather(*(until_tokens(answer, 1, task) for answer, task in zip(answers, tasks, strict=True)))
    await until_tokens(answers[0], at := rng.randint(1, _MAX_TOKENS // 2), tasks[0])
    killed_s = time.monotonic()
    stack.kill(victim)
    await asyncio.gather(*tasks)
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    hit = [answer for answer in answers if answer.was_hit]
    figures.check(bool(hit), "no stream was hit")
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    say(f"run {figures.num_runs}: the only server of {span} killed at token {at}; {len(hit)} recovered, longest stall "
        f"{max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(victim)


async def _with_spare(stack: RunningStack) -> tuple[ManagedProcess, Span]:
    """A server that alone holds a span, once another one keeps that span, and may leave its own."""
    found: list[tuple[ManagedProcess, Span]] = []

    async def has_spare() -> bool:
        placement = await asyncio.to_thread(stack.local.placement)
        ready = [
            each
            for each in (placement.servers if placement is not None else ())
            if each.state == router_pb2.SERVER_STATE_READY and not each.suspected
        ]
        spans = [Span.from_message(each.span) for each in ready]
        kept = {
            Span.from_message(spare)
            for each, span in zip(ready, spans, strict=True)
            if spans.count(span) > 1
            for spare in each.load.spare_spans
        }
        found[:] = [
            (next(server for server in stack.servers if server.address == each.server.address), span)
            for each, span in zip(ready, spans, strict=True)
            if span in kept and spans.count(span) == 1
        ]
        return bool(found)

    await until(has_spare, 60)
    return found[0]
