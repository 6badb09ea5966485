"""The client service's time for a token does not depend on the tokens before. The chain here does nothing."""

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch

from corolla.chain.row_sampling import TokenSampler
from corolla.chain.session import ChainSession
from corolla.client.generation.answer import Answer
from corolla.client.generation.loop import AnswerSampler, generate
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.compute_thread import ComputeThread
from corolla.decoding.sampling import Sampler, SamplingParams
from corolla.decoding.speculator import SpeculationMode, SpeculationOptions, Speculators
from corolla.decoding.stopping import StopDecider
from tests.checkpoints import make_tokenizer

TOKENIZER = TextTokenizer(make_tokenizer())
PROMPT = TOKENIZER.encode("the thin man in the inner tent", add_special_tokens=False)
VOCABULARY_SIZE = 300
NUM_TOKENS = 4000
WINDOW = 400
MAX_RATIO = 1.2
NUM_TRIES = 8


class NoChain:
    """A session whose steps take no time: the logits are there already."""

    max_draft_tokens = 8

    def __init__(self) -> None:
        self._logits = torch.randn(4096, VOCABULARY_SIZE, generator=torch.Generator().manual_seed(1))
        self._num_steps = 0

    async def prefill(self, token_ids: Sequence[int], sampler: TokenSampler) -> list[int]:
        return sampler.sample(self._rows(1))

    async def decode(self, token_id: int, draft_tokens: Sequence[int], sampler: TokenSampler) -> list[int]:
        return sampler.sample(self._rows(1 + len(draft_tokens)))

    def _rows(self, num_rows: int) -> torch.Tensor:
        self._num_steps += 1
        start = self._num_steps % (len(self._logits) - num_rows)
        return self._logits[start : start + num_rows]


async def token_seconds(params: SamplingParams, stop: Sequence[str], mode: SpeculationMode) -> list[float]:
    """Processor time between each token of an answer and the next."""
    sampler = Sampler(params, PROMPT)
    answer = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=NUM_TOKENS), stop)
    compute = ComputeThread(cast(Any, None))
    speculators = Speculators(compute, mode)
    speculator = speculators.make(SpeculationOptions(), sampler, PROMPT, lambda drafted, accepted: None)
    stamps: list[float] = []
    session = cast(ChainSession, NoChain())
    answer_sampler = AnswerSampler(sampler, answer, time.monotonic())
    async for _ in generate(session, answer_sampler, answer, partial(session.prefill, PROMPT), speculator):
        stamps.append(time.process_time())
    assert len(stamps) == NUM_TOKENS
    compute.close()
    return [later - earlier for earlier, later in itertools.pairwise(stamps)]


@pytest.mark.parametrize(
    "params, stop, mode",
    [
        (SamplingParams(), (), SpeculationMode.OFF),
        (SamplingParams(num_logprobs=3), ("never seen in this text",), SpeculationMode.OFF),
        (
            SamplingParams(1.0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, seed=1),
            (),
            SpeculationMode.OFF,
        ),
        (SamplingParams(1.0, seed=1), (), SpeculationMode.PROMPT_LOOKUP),
    ],
    ids=["greedy", "stop sequence", "penalties", "draft tokens"],
)
@pytest.mark.full
async def test_token_4000_costs_as_much_as_token_40(
    params: SamplingParams, stop: Sequence[str], mode: SpeculationMode
) -> None:
    ratios = []
    for _ in range(NUM_TRIES):
        gc.collect()
        seconds = await token_seconds(params, stop, mode)
        ratios.append(statistics.median(seconds[-WINDOW:]) / statistics.median(seconds[40 : 40 + WINDOW]))
        # A neighbour on the machine can only disturb; work that grows with the text would show every time.
        if ratios[-1] <= MAX_RATIO:
            return
    pytest.fail(f"later tokens cost more: {ratios}")
