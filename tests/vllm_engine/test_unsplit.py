"""Chains answer as vLLM itself does with the whole model, token for token, and so does transformers."""

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoTokenizer

from corolla.models.demo import demo_checkpoint
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Generation
from tests.gemma import gemma_checkpoint, unpacked_gemma
from tests.golden import prompt_texts
from tests.integration.swarm import Swarm
from tests.reference import Sampling, Unsplit
from tests.unpacked import unpacked_demo
from tests.vllm_engine.questions import Answer, Question, first_difference
from tests.vllm_engine.whole_model import answers_by_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.model, pytest.mark.timeout(900)]

CHUNK_TOKENS: Final = 128
MOST_PROMPT_TOKENS: Final = 600
ASKED: Final[tuple[tuple[str, Sampling], ...]] = (
    ("english-fact", {}),
    ("code-json", {}),
    ("english-declaration", {}),
    ("digits", {"temperature": 1.0, "seed": 1008}),
    (
        "english-sonnet",
        {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 1013},
    ),
)
"""Prompts of `tests/golden`; the longest is cut into chunks, and crosses Gemma's windows."""
FORKED: Final = "english-trailing-spaces"
FORKS: Final[tuple[Sampling, ...]] = tuple({"temperature": 1.0, "seed": 5 + number} for number in range(3))
CHAINS: Final = {
    "one hop": ("vllm",),
    "two hops": ("vllm", "vllm"),
    "three hops": ("vllm", "vllm", "vllm"),
    "transformers last": ("vllm", "transformers"),
    "transformers first": ("transformers", "vllm"),
}


@dataclass(frozen=True, slots=True)
class Model:
    """A real model.

    Attributes:
        checkpoint: the file that servers read.
        unpacked: the folder that vLLM and transformers read.
        ends: where the spans of 1, 2 and 3 hops end.
    """

    checkpoint: Callable[[], Path]
    unpacked: Callable[[], Path]
    num_tokens: int
    ends: tuple[tuple[int, ...], ...]

    def spans(self, num_hops: int) -> list[str]:
        return [f"{start}:{end}" for start, end in pairwise((0, *self.ends[num_hops - 1]))]


MODELS: Final = {
    "SmolLM2-135M": Model(demo_checkpoint, unpacked_demo, 32, ((30,), (13, 30), (7, 20, 30))),
    "Gemma-3-270M": Model(gemma_checkpoint, unpacked_gemma, 24, ((18,), (11, 18), (5, 12, 18))),
}


Answered = list[tuple[Question, Answer]]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def answered(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """By vLLM: all that is asked, and the forks last."""
    folder = model.unpacked()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    questions = [
        Question(tokenizer.encode(prompt_texts()[name])[:MOST_PROMPT_TOKENS], model.num_tokens, sampling)
        for name, sampling in (*ASKED, *((FORKED, sampling) for sampling in FORKS))
    ]
    answers = answers_by_vllm(folder, questions, tmp_path_factory.mktemp("vllm"))
    return list(zip(questions, answers, strict=True))


def assert_same(who: str, question: Question, answer: Answer, token_ids: Sequence[int]) -> None:
    """Tokens part nowhere, or at a tie, which is shown."""
    difference = first_difference(question, answer, token_ids)
    if difference is not None:
        assert difference.is_tie, f"{who}: {difference}"
        warnings.warn(f"{who} parts from vLLM at a tie: {difference}", stacklevel=2)


def test_transformers_answers_as_vllm_unsplit(model: Model, answered: Answered) -> None:
    """Up to a tie: from its own logits after the same tokens, the same token is chosen."""
    assert max(len(question.prompt_ids) for question, _ in answered) == MOST_PROMPT_TOKENS
    unsplit = Unsplit(model.unpacked())
    for question, answer in answered:
        assert len(answer.token_ids) == question.num_tokens
        ids = torch.tensor([[*question.prompt_ids, *answer.token_ids[:-1]]])
        with torch.inference_mode():
            logits = unsplit.model(ids, logits_to_keep=question.num_tokens).logits[0]
        assert_same("transformers", question, answer, answer.chosen_by(question, logits))


@pytest.mark.parametrize("chain", CHAINS)
async def test_chains_answer_as_vllm_unsplit(tmp_path: Path, model: Model, answered: Answered, chain: str) -> None:
    """All at once: plain, with draft tokens, and several completions of one prompt."""
    asked, forks = answered[: len(ASKED)], answered[len(ASKED) :]
    async with chain_of(tmp_path, model, CHAINS[chain]) as client:
        forked, *given = await asyncio.gather(
            ask(client, forks[0][0], n=len(forks)),
            *(ask(client, question) for question, _ in asked),
            *(ask(client, question, speculation="prompt_lookup") for question, _ in asked),
        )
    plain, drafted = given[: len(asked)], given[len(asked) :]
    assert not any(each.usage.drafted_tokens for each in plain)
    assert any(each.usage.accepted_tokens for each in drafted)
    for (question, answer), *both in zip(asked, plain, drafted, strict=True):
        for generation in both:
            assert_same(chain, question, answer, generation.token_ids)
    for (question, answer), completion in zip(forks, forked.completions, strict=True):
        assert_same(chain, question, answer, completion.token_ids)


@asynccontextmanager
async def chain_of(folder: Path, model: Model, engines: Sequence[str]) -> AsyncIterator[AsyncClient]:
    """A client of block servers with one engine each."""
    async with Swarm(folder, model.checkpoint(), (), num_clients=0) as swarm:
        for span, engine in zip(model.spans(len(engines)), engines, strict=True):
            await swarm.add_server(span, engine=engine)
        await swarm.add_client(prefill_chunk_tokens=CHUNK_TOKENS, adaptive_drafts=False, max_draft_tokens=4)
        await swarm.until_ready()
        async with swarm.connect() as client:
            yield client
        await swarm.until_empty()


async def ask(client: AsyncClient, question: Question, **options: Any) -> Generation:
    sampling: Any = question.sampling
    return await client.generate(
        list(question.prompt_ids), max_tokens=question.num_tokens, ignore_eos=True, **sampling, **options
    )
