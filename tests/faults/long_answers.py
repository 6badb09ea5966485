"""Two answers that outlast a fault: they go on once it is over, and their tokens are those that come without it."""

import asyncio
import random
from typing import Final, Self

from tests.faults.figures import Figures
from tests.faults.stand import Stand
from tests.faults.streams import Answer, Question, listen, until_tokens

_MAX_TOKENS: Final = 7000
_AFTERWARDS_S: Final = 1.5


class LongAnswers:
    """Asked for when it is made; `end` ends them."""

    def __init__(self, stand: Stand, rng: random.Random) -> None:
        self._stand = stand
        self._answers = [Answer(Question.draw(rng, 4, _MAX_TOKENS)) for _ in range(2)]
        self._tasks = [asyncio.create_task(listen(stand.client, answer)) for answer in self._answers]

    @classmethod
    async def begin(cls, stand: Stand, rng: random.Random) -> Self:
        """They are under way: of the first one some tokens have come."""
        answers = cls(stand, rng)
        await until_tokens(answers._answers[0], rng.randint(2, 60), answers._tasks[0])
        return answers

    async def end(self, figures: Figures) -> list[int]:
        """To be called as soon as the fault is over: sees that they go on, and ends them.

        Returns:
            How many tokens each has.
        """
        before = self._num_tokens()
        await asyncio.sleep(_AFTERWARDS_S)
        num_tokens = self._num_tokens()
        for task, num_before, num_after in zip(self._tasks, before, num_tokens, strict=True):
            figures.check(task.done() or num_after > num_before, "a stream stands still after the fault")
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return num_tokens

    async def compare(self, figures: Figures) -> None:
        """With undisturbed answers of the same lengths, once the stack is whole."""
        await self._stand.until_whole()
        undisturbed = [
            Answer(Question(answer.question.prompt, len(answer.token_ids), answer.question.options))
            for answer in self._answers
        ]
        await asyncio.gather(*(listen(self._stand.client, answer) for answer in undisturbed))
        for answer, expected in zip(self._answers, undisturbed, strict=True):
            figures.check(answer.failure is None, f"the caller got {type(answer.failure).__name__}: {answer.failure}")
            figures.check(answer.token_ids == expected.token_ids, "the tokens are not those of the undisturbed answer")

    def longest_waits_s(self, since_s: float) -> list[float]:
        """Of each, from `since_s` on."""
        return [answer.longest_wait_s(since_s) for answer in self._answers]

    def _num_tokens(self) -> list[int]:
        return [len(answer.token_ids) for answer in self._answers]
