"""Two answers that outlast a fault: they continue once it is over, with the tokens of undisturbed ones."""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final, Self

from tests.faults.figures import Figures
from tests.faults.running_stack import RunningStack
from tests.faults.streams import Answer, Question, listen, until_tokens

_MAX_TOKENS: Final = 7000
_NUM_QUESTIONS: Final = 4
_AFTERWARDS_S: Final = 1.5
_GIVE_UP_S: Final = 30.0


class LongRepertoire:
    """Questions that are asked again and again, and of each the longest undisturbed answer so far."""

    def __init__(self, stack: RunningStack, rng: random.Random) -> None:
        self.stack = stack
        self._max_tokens = _MAX_TOKENS - stack.context
        self._undisturbed = {
            Question.draw(rng, 4, self._max_tokens, stack.context): list[int]() for _ in range(_NUM_QUESTIONS)
        }

    def draw(self, rng: random.Random, num_questions: int) -> list[Question]:
        return rng.sample(list(self._undisturbed), num_questions)

    async def undisturbed(self, question: Question, num_tokens: int) -> list[int]:
        """The first tokens of the answer. Nothing may be broken meanwhile."""
        if len(self._undisturbed[question]) < num_tokens:
            # This answer is longer than needed, so that it also serves later ones with a few tokens more.
            longer = Question(question.prompt, min(self._max_tokens, num_tokens * 5 // 4), question.options)
            answer = Answer(longer)
            await listen(self.stack.client, answer)
            self._undisturbed[question] = answer.token_ids
        return self._undisturbed[question][:num_tokens]


class LongAnswers:
    """Asked for when it is made; `end` ends them."""

    def __init__(self, repertoire: LongRepertoire, rng: random.Random) -> None:
        self._repertoire = repertoire
        self._answers = [Answer(question) for question in repertoire.draw(rng, 2)]
        self._tasks = [asyncio.create_task(listen(repertoire.stack.client, answer)) for answer in self._answers]

    @classmethod
    async def begin(cls, repertoire: LongRepertoire, rng: random.Random) -> Self:
        """They are under way: of the first one some tokens have come."""
        answers = cls(repertoire, rng)
        await answers.get_under_way(rng.randint(2, 60))
        return answers

    async def get_under_way(self, num_tokens: int) -> None:
        """Returns when so many tokens of the first one have come."""
        await until_tokens(self._answers[0], num_tokens, self._tasks[0])

    async def end(self, figures: Figures) -> list[int]:
        """Sees that the answers go on, and ends them; to be called as soon as the fault is over.

        Returns:
            How many tokens each has.
        """
        before = self._num_tokens()
        give_up_s = time.monotonic() + _GIVE_UP_S
        await asyncio.sleep(_AFTERWARDS_S)
        # How long they took is judged by their waits.
        while not self._go_on(before) and time.monotonic() < give_up_s:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        num_tokens = self._num_tokens()
        figures.check(self._go_on(before), "a stream stands still after the fault")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return num_tokens

    async def compare(self, figures: Figures) -> None:
        """Compares with undisturbed answers of the same lengths, once the stack is whole."""
        await self._repertoire.stack.until_whole()
        for answer in self._answers:
            expected = await self._repertoire.undisturbed(answer.question, len(answer.token_ids))
            figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
            figures.check(answer.token_ids == expected, "the tokens are not those of the undisturbed answer")

    def longest_waits_s(self, since_s: float) -> list[float]:
        """The longest wait of each answer from `since_s` on."""
        return [answer.longest_wait_s(since_s) for answer in self._answers]

    def _go_on(self, before: Sequence[int]) -> bool:
        """Whether each has more tokens than it had, or has ended."""
        after = self._num_tokens()
        return all(task.done() or now > had for task, had, now in zip(self._tasks, before, after, strict=True))

    def _num_tokens(self) -> list[int]:
        return [len(answer.token_ids) for answer in self._answers]
