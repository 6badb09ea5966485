"""Adapters are loaded, unloaded and taken out under traffic, and a server is killed: no answer has a wrong token.

More adapters are registered than a server has memory for. What each of them answers undisturbed is compared with PEFT
first.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import grpc

from corolla.chassis.errors import AdapterNotFound
from corolla.models.adapters.file import digest_of
from corolla.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.adapters import make_adapter, unsplit_with
from tests.faults.figures import Figures, say
from tests.faults.kill import MAX_STALL_S
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, Repertoire, listen, until_tokens

ENVIRONMENT: Final = {"COROLLA_ADAPTERS_MIB": "1"}
_NUM_ADAPTERS: Final = 8
_RANK: Final = 16
_SHARE_OF_NEW: Final = 0.6
_CHURNED: Final = "churned"


async def adapters(stack: RunningStack, rng: random.Random, runs: range) -> int:
    """Each run has 1 to 4 streams with adapters or without, one killed server, and an adapter that comes and goes."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="corolla-adapters-") as name:
        folders = await asyncio.to_thread(_make, Path(stack.local.options.model), Path(name))
        for each, folder in folders.items():
            await _add(stack, each, folder)
        repertoire = Repertoire(stack.client)
        await _compare(stack, folders, figures)
        known: list[Question] = []
        for number in runs:
            figures.num_runs += 1
            await _run(stack, rng, figures, repertoire, known, folders, number % len(stack.spans))
    return figures.conclude(MAX_STALL_S)


def _make(model: Path, root: Path) -> Mapping[str, Path]:
    return {f"a{seed}": make_adapter(model, root / f"a{seed}", seed=seed, r=_RANK) for seed in range(_NUM_ADAPTERS)}


async def _compare(stack: RunningStack, folders: Mapping[str, Path], figures: Figures) -> None:
    """Each adapter's greedy answer, and that without one, with PEFT's."""
    prompt, num_tokens = list(range(30, 60)), 32
    for name in ("", *folders):
        generation = await stack.client.generate(prompt, adapter=name, max_tokens=num_tokens, ignore_eos=True)
        unsplit = await asyncio.to_thread(unsplit_with, Path(stack.local.options.model), folders.get(name))
        expected = unsplit.generate(prompt, num_tokens, ignore_eos=True).token_ids
        figures.check(list(generation.token_ids) == expected, f"adapter {name or 'none'}: the tokens are not PEFT's")


async def _run(
    stack: RunningStack,
    rng: random.Random,
    figures: Figures,
    repertoire: Repertoire,
    known: list[Question],
    folders: Mapping[str, Path],
    lost_hop: int,
) -> None:
    questions = [_draw(rng, known, [*folders]) for _ in range(rng.randint(1, 4))]
    undisturbed = await repertoire.undisturbed(questions)
    answers = [Answer(question) for question in questions]
    tasks = [asyncio.create_task(listen(stack.client, answer)) for answer in answers]
    churning = asyncio.create_task(_churn(stack, rng, figures, folders))
    watched = rng.randrange(len(answers))
    await until_tokens(answers[watched], at := rng.randint(0, questions[watched].max_tokens - 8), tasks[watched])
    victim = await stack.busiest(stack.spans[lost_hop])
    killed_s = time.monotonic()
    stack.kill(victim)
    await asyncio.gather(*tasks, churning)
    for answer, expected in zip(answers, undisturbed, strict=True):
        answer.compare(expected, figures)
    hit = [answer for answer in answers if answer.was_hit]
    stalls = [answer.longest_wait_s(killed_s) for answer in hit]
    figures.stalls_s += stalls
    names = ", ".join(dict(question.options)["adapter"] or "none" for question in questions)
    say(f"run {figures.num_runs}: streams with {names}; server of {victim.blocks} killed at token {at}; "
        f"{len(hit)} recovered, longest stall {max(stalls, default=0):.2f} s")  # fmt: skip
    await stack.restart(victim)


def _draw(rng: random.Random, known: list[Question], names: list[str]) -> Question:
    if known and rng.random() > _SHARE_OF_NEW:
        return rng.choice(known)
    drawn = Question.draw(rng, rng.randint(1, 20), rng.randint(96, 128))
    question = replace(drawn, options=(*drawn.options, ("adapter", rng.choice(["", *names]))))
    known.append(question)
    return question


async def _churn(stack: RunningStack, rng: random.Random, figures: Figures, folders: Mapping[str, Path]) -> None:
    """One more adapter is registered, used and taken out: answers with it have its tokens, or end with its status."""
    name, folder = rng.choice([*folders.items()])
    question = Question(" in the inner tent", 48, (("adapter", name),))
    same = replace(question, options=(("adapter", _CHURNED),))
    expected, answer = Answer(question), Answer(same)
    await listen(stack.client, expected)
    await _add(stack, _CHURNED, folder)
    task = asyncio.create_task(listen(stack.client, answer))
    await asyncio.sleep(rng.uniform(0, 0.5))
    await _remove(stack, _CHURNED)
    await task
    is_ended = answer.failure is None or isinstance(answer.failure, AdapterNotFound)
    figures.check(is_ended, f"a caller of an adapter that was taken out got {answer.failure!r}")
    has_its_tokens = answer.token_ids == expected.token_ids[: len(answer.token_ids)]
    figures.check(has_its_tokens, "the tokens of an adapter that was taken out are not its own")


async def _add(stack: RunningStack, name: str, folder: Path) -> None:
    version = common_pb2.AdapterVersion(name=name, digest=digest_of(folder))
    adapter = router_pb2.RegisteredAdapter(version=version, source=str(folder))
    async with stack.local.operator.open_channel(stack.local.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.AddAdapter(router_pb2.AddAdapterRequest(model=await _model(channel), adapter=adapter), timeout=10)


async def _remove(stack: RunningStack, name: str) -> None:
    async with stack.local.operator.open_channel(stack.local.router_address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        await stub.RemoveAdapter(router_pb2.RemoveAdapterRequest(model=await _model(channel), name=name), timeout=10)


async def _model(channel: grpc.aio.Channel) -> str:
    stub = router_pb2_grpc.RouterServiceStub(channel)
    return (await stub.GetPlacement(router_pb2.GetPlacementRequest(), timeout=10)).model
