"""Chats through a session answer as one local run of the unsplit model over the growing token log does.

What turns a log into the next turn's prompt is spelled out here for the demo model's template, apart from the service's
own code. Turns alternate between two client services, since a session belongs to neither.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import torch

from corolla.models.demo import demo_checkpoint
from corolla.sdk.async_client import AsyncChat, AsyncClient
from corolla.sdk.results import FinishReason, Reply
from tests.integration.swarm import Swarm
from tests.reference import Sampling, Unsplit
from tests.tiers import quick

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

END = "<|im_end|>"
DRAWN: Sampling = {"temperature": 0.8, "top_k": 40, "seed": 21}
EOS, LENGTH, STOP = FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_SEQUENCE


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn and how it is meant to end."""

    question: str
    ends_by: FinishReason
    max_tokens: int = 48
    sampling: Sampling | None = None
    stop: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversation."""

    turns: tuple[Turn, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """A turn of the local run."""

    token_ids: list[int]
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int


LocalRuns = Callable[[str], tuple[Expected, ...]]

FRANCE, GERMANY = "What is the capital of France?", "What is the capital of Germany?"

PLANS = {
    "ends, is cut, ends": Plan(
        (Turn(FRANCE, EOS), Turn("Write a long story about a rose.", LENGTH, 14), Turn(GERMANY, EOS))
    ),
    "stops several tokens back, then ends": Plan((Turn(FRANCE, STOP, stop=" of France is"), Turn(GERMANY, EOS))),
    "stops within a token, then is cut": Plan(
        (Turn(FRANCE, STOP, stop="apita"), Turn(GERMANY, LENGTH, 5), Turn("Say it again.", EOS)),
        system="You answer in one short sentence.",
    ),
    "cut after one token": Plan((Turn(FRANCE, LENGTH, 1), Turn(GERMANY, LENGTH, 1), Turn("Tell me more.", EOS, 10))),
    "drawn, each turn with a seed": Plan(
        (
            Turn("Name three flowers.", LENGTH, 16, DRAWN),
            Turn("Which one is red?", LENGTH, 16, {**DRAWN, "seed": 5}),
            Turn("Why?", LENGTH, 16, {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 6}),
        )
    ),
    "drawn, each turn by its own seed": Plan(
        (
            Turn("Tell me a joke.", LENGTH, 12, DRAWN),
            Turn("Another one.", EOS, 12, DRAWN | {"seed": 5}),
            Turn("And a last one.", EOS, 12, DRAWN | {"seed": 6}),  # end and length at once
        ),
        system="You are a clown.",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """Clients of two client services over one chain of three hops; chunks are smaller than the prompts."""
    swarm = Swarm(
        tmp_path_factory.mktemp("swarm"), demo_checkpoint(), ["0:9", "9:11", "11:30"],
        num_clients=2, client={"prefill_chunk_tokens": 24},
    )  # fmt: skip
    async with swarm, swarm.connect(0) as first, swarm.connect(1) as second:
        yield first, second
        await swarm.until_empty()


@pytest.fixture(scope="module")
def local_runs() -> Iterator[LocalRuns]:
    """What each plan gives on one machine, computed once."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    unsplit = Unsplit.demo()
    yield functools.cache(lambda name: tuple(local_run(unsplit, PLANS[name])))
    torch.set_num_threads(num_threads)


def local_run(unsplit: Unsplit, plan: Plan) -> Iterator[Expected]:
    """The conversation on one machine: each turn's answer is generated from the whole token log anew."""
    system = [("system", plan.system)] if plan.system else []
    log: list[int] = []
    rest = ""
    num_processed = 0
    for turn in plan.turns:
        if log:
            question = f"\n<|im_start|>user\n{turn.question}{END}\n<|im_start|>assistant\n"
            prompt_ids = [*log, *unsplit.encode(rest + question)]
        else:
            prompt_ids = unsplit.chat_ids([*system, ("user", turn.question)])
        reference = unsplit.generate(prompt_ids, turn.max_tokens, turn.sampling)
        token_ids = reference.token_ids
        text = unsplit.decode(token_ids)
        if turn.stop:
            num_needed = next(n for n in range(len(token_ids) + 1) if turn.stop in unsplit.decode(token_ids[:n]))
            token_ids = token_ids[:num_needed]
            text = text[: text.index(turn.stop)]
        yield Expected(token_ids, text, len(prompt_ids), min(len(log), num_processed))
        # The newest token has been chosen, but no hop has seen it.
        num_processed = len(prompt_ids) + len(token_ids) - 1
        ended = bool(token_ids) and token_ids[-1] in unsplit.eos_token_ids
        num_kept = max(n for n in range(len(token_ids) + 1) if text.startswith(unsplit.decode(token_ids[:n])))
        log = [*prompt_ids, *token_ids[:num_kept]]
        rest = text[len(unsplit.decode(token_ids[:num_kept])) :] + ("" if ended else END)


@pytest.mark.parametrize("name", quick(PLANS, kinds=["stops within a token, then is cut"]))
async def test_a_chat_equals_the_local_run(
    clients: tuple[AsyncClient, AsyncClient], local_runs: LocalRuns, name: str
) -> None:
    plan = PLANS[name]
    # In a thread: the servers' leases depend on this event loop.
    expected = await asyncio.to_thread(local_runs, name)
    async with clients[0].chat(system=plan.system or None) as chat:
        elsewhere = clients[1].chat(session=await chat.open())
        for number, (turn, wanted) in enumerate(zip(plan.turns, expected, strict=True)):
            reply = await ask(elsewhere if number % 2 else chat, turn)
            assert list(reply.token_ids) == wanted.token_ids, turn
            assert reply.text == wanted.text
            assert reply.finish_reason is turn.ends_by
            assert reply.usage.prompt_tokens == wanted.num_prompt_tokens
            # Other conversations may have left the beginning of this one in the hops' caches.
            assert wanted.num_cached_tokens <= reply.usage.cached_tokens < wanted.num_prompt_tokens
            assert (wanted.num_cached_tokens > 0) == (number > 0)
        assert (await chat.info()).num_turns == len(plan.turns)


async def ask(chat: AsyncChat, turn: Turn) -> Reply:
    sampling: Sampling = {**(turn.sampling or {})}
    return await chat.send(turn.question, max_tokens=turn.max_tokens, stop=turn.stop or None, **sampling)


@pytest.mark.full
async def test_turns_of_several_chats_at_once_do_not_mix(
    clients: tuple[AsyncClient, AsyncClient], local_runs: LocalRuns
) -> None:
    names = ["stops several tokens back, then ends", "drawn, each turn by its own seed", "cut after one token"]

    async def texts(plan: Plan, client: AsyncClient) -> list[str]:
        async with client.chat(system=plan.system or None) as chat:
            return [(await ask(chat, turn)).text for turn in plan.turns]

    expected = [[turn.text for turn in await asyncio.to_thread(local_runs, name)] for name in names]
    given = await asyncio.gather(*(texts(PLANS[name], clients[number % 2]) for number, name in enumerate(names)))
    assert given == expected
