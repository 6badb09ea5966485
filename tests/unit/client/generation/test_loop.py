"""The client service's time for a token does not depend on the tokens before. The chain here does nothing."""

import gc
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import pytest

from corolla.chain.session import ChainSession, TokenReader
from corolla.client.generation.answer import Answer
from corolla.client.generation.running_request import next_deltas
from corolla.client.output_parsing.deltas import Delta
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.parameters import SampledToken
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
    """A session whose rounds take no time. Of `num_drafted` draft tokens in each, the first one is always right."""

    def __init__(self, num_drafted: int) -> None:
        self._dice = random.Random(1)
        self._num_drafted = num_drafted

    has_unread_tokens = False
    is_full = False

    async def prefill(self, token_ids: Sequence[int], reader: TokenReader) -> None:
        self._choose(reader)

    async def decode(self, reader: TokenReader) -> tuple[int, int]:
        num_taken = 1
        if self._choose(reader) and self._num_drafted:
            self._choose(reader)
            num_taken += 1
        return self._num_drafted, num_taken

    def _choose(self, reader: TokenReader) -> bool:
        return reader.read(SampledToken(self._dice.randrange(4, VOCABULARY_SIZE), -1.0, ((5, -1.0), (6, -2.0))))


async def no_growth(session: ChainSession) -> bool:
    raise AssertionError("no session is full here")


async def generated(
    session: NoChain, answer: Answer, count_drafts: Callable[[int, int], None]
) -> AsyncIterator[Sequence[Delta]]:
    """What each round of an answer brings."""
    chain = cast(ChainSession, session)
    await chain.prefill(PROMPT, answer)
    yield answer.deltas()
    while answer.finish_reason is None:
        yield await next_deltas(chain, answer, no_growth, count_drafts)


async def token_seconds(stop: Sequence[str], session: NoChain, counts: list[tuple[int, int]]) -> list[float]:
    """Processor time between what each round of an answer brings and the next."""
    answer = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=NUM_TOKENS), stop)
    stamps: list[float] = []
    num_tokens = 0
    async for together in generated(session, answer, lambda *each: counts.append(each)):
        stamps.append(time.process_time())
        num_tokens += len(together)
    assert num_tokens == NUM_TOKENS
    return [later - earlier for earlier, later in itertools.pairwise(stamps)]


async def test_draft_tokens_are_counted_and_those_that_were_right() -> None:
    counts: list[tuple[int, int]] = []
    await token_seconds((), NoChain(3), counts)
    # The first token comes with the prompt, two with each round, and no more than the answer has room for.
    assert counts == [(3, 1)] * 1999 + [(3, 0)]


async def test_tokens_that_are_at_hand_are_read_together() -> None:
    class Ahead(NoChain):
        """The hops ran ahead of a slow caller: of each five tokens four are at hand."""

        num_read = 0

        @property
        def has_unread_tokens(self) -> bool:  # type: ignore[override]
            return self.num_read % 5 != 0

        async def decode(self, reader: TokenReader) -> tuple[int, int]:
            self.num_read += 1
            return await super().decode(reader)

    answer = Answer(TOKENIZER, PROMPT, StopDecider(max_new_tokens=13), ())
    together = [len(deltas) async for deltas in generated(Ahead(0), answer, print)]
    # The first token never waits for others.
    assert together == [1, 5, 5, 2]


@pytest.mark.parametrize("num_drafted", [0, 3], ids=["plain", "draft tokens"])
@pytest.mark.parametrize("stop", [(), ("never seen in this text",)], ids=["no stop", "stop sequence"])
@pytest.mark.full
async def test_token_4000_costs_as_much_as_token_40(stop: Sequence[str], num_drafted: int) -> None:
    ratios = []
    for _ in range(NUM_TRIES):
        gc.collect()
        seconds = await token_seconds(stop, NoChain(num_drafted), [])
        ratios.append(statistics.median(seconds[-WINDOW:]) / statistics.median(seconds[40 : 40 + WINDOW]))
        # A neighbour on the machine can only disturb; work that grows with the text would show every time.
        if ratios[-1] <= MAX_RATIO:
            return
    pytest.fail(f"later tokens cost more: {ratios}")
