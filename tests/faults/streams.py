"""Answers as a caller sees them: their tokens, and when each came."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pytest

from corolla.chassis.errors import CorollaError
from corolla.sdk.async_client import AsyncClient
from corolla.sdk.results import Usage
from tests.faults.figures import Figures
from tests.faults.pauses import PAUSES
from tests.faults.running_stack import shuffled_words

_TOKEN_IDS: Final = range(16, 256)
"""Every model that is tried has them, as tokens of texts."""


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same.

    Attributes:
        prompt: a text, or the ids of its tokens.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def draw(cls, rng: random.Random, num_words: int, max_tokens: int, context: int = 0) -> "Question":
        """Greedy or sampled with a seed, also with penalties and log probabilities, with draft tokens or without.

        Args:
            context: the number of the prompt's tokens; 0: the prompt has `num_words` words.
        """
        sampled = {"temperature": 1.0, "top_p": 0.95, "seed": rng.randrange(1 << 30)}
        penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
        options: dict[str, Any] = rng.choice(({}, sampled, {**sampled, **penalties, "logprobs": 2}))
        if rng.random() < 0.3:
            options = {**options, "speculation": "prompt_lookup"}
        prompt = tuple(rng.choices(_TOKEN_IDS, k=context)) if context else shuffled_words(rng, num_words)
        return cls(prompt, max_tokens, tuple(options.items()))

    def arguments(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "ignore_eos": True, **dict(self.options)}


@dataclass
class Answer:
    """What came.

    Attributes:
        logprobs: of each token, where they were asked for.
        arrived_s: when each token came, by `time.monotonic()`.
        failure: the error that reached the caller, if one did.
        came: is set by each token.
    """

    question: Question
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    failure: CorollaError | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def was_hit(self) -> bool:
        """Whether hops of the answer were replaced."""
        return self.usage is not None and self.usage.recoveries > 0

    def compare(self, undisturbed: "Answer", figures: Figures) -> None:
        """Checks that both came, with the same tokens, and the same log probabilities but for rounding."""
        figures.check(undisturbed.failure is None, f"the undisturbed answer failed: {undisturbed.failure}")
        figures.check(self.failure is None, f"the caller got {type(self.failure).__name__}: {self.failure}")
        is_equal = self.token_ids == undisturbed.token_ids
        is_near = self.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
        figures.check(is_equal and is_near, "the tokens are not those of the undisturbed answer")

    def longest_wait_s(self, since_s: float, until_s: float = math.inf) -> float:
        """Between two tokens, of which the second came after `since_s`, and the first before `until_s`."""
        return longest_wait_s(self.arrived_s, since_s, until_s)


def longest_wait_s(arrived_s: Sequence[float], since_s: float, until_s: float = math.inf) -> float:
    """Between two arrivals, of which the second was after `since_s`, and the first before `until_s`.

    Without the pauses of this machine.
    """
    return max(
        (
            after - before - PAUSES.num_seconds(before, after)
            for before, after in pairwise(arrived_s)
            if after >= since_s and before <= until_s
        ),
        default=0.0,
    )


class Repertoire:
    """Questions, each of which was once answered without a disturbance.

    Most are asked again and again: then hops find the beginning in their caches, which makes a recovery harder, and no
    time goes into one more undisturbed answer.
    """

    _SHARE_OF_NEW: Final = 0.4

    def __init__(self, client: AsyncClient, context: int = 0) -> None:
        self._client = client
        self._context = context
        self._undisturbed: dict[Question, Answer] = {}

    def draw(self, rng: random.Random, num_words: int, max_tokens: int) -> Question:
        """A question asked before, or a new one."""
        known = list(self._undisturbed)
        if known and rng.random() > self._SHARE_OF_NEW:
            return rng.choice(known)
        return Question.draw(rng, num_words, max_tokens, self._context)

    async def undisturbed(self, questions: Sequence[Question]) -> list[Answer]:
        """Their answers. Nothing may be broken meanwhile."""
        new = [Answer(question) for question in dict.fromkeys(questions) if question not in self._undisturbed]
        await asyncio.gather(*(listen(self._client, answer) for answer in new))
        self._undisturbed.update((answer.question, answer) for answer in new)
        return [self._undisturbed[question] for question in questions]


async def listen(client: AsyncClient, answer: Answer, **more: Any) -> None:
    """Fills `answer` as it comes, behind what it has."""
    answer.failure = None
    try:
        async for chunk in client.stream(answer.question.prompt, **answer.question.arguments(), **more):
            now_s = time.monotonic()
            for token_id in chunk.token_ids:
                answer.token_ids.append(token_id)
                answer.arrived_s.append(now_s)
            answer.logprobs += [each.logprob for each in chunk.logprobs]
            answer.came.set()
            if chunk.usage is not None:
                answer.usage = chunk.usage
    except CorollaError as failure:
        answer.failure = failure


async def until_tokens(answer: Answer, num_tokens: int, task: "asyncio.Task[None]") -> None:
    """Until so many tokens have come, or the answer ended."""
    task.add_done_callback(lambda _: answer.came.set())
    while len(answer.token_ids) < num_tokens and not task.done():
        answer.came.clear()
        await answer.came.wait()
