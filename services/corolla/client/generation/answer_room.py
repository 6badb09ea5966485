"""The room for the answers to one request, which grows with them."""

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from corolla.chain.session import ChainSession
from corolla.chassis.errors import QuotaExceeded
from corolla.client.quotas.enforcer import Allowance

GROWTH_PATIENCE_S: Final = 30.0
_GROWTH_INTERVAL_S: Final = 0.5


class AnswerRoom:
    """The tokens for which the answers to one request have reserved pages, and quota of their tenant.

    Args:
        first_tokens: for how many tokens each answer's session has room at first, prompt included.
        growth_tokens: the fewest further tokens that an answer asks for.
    """

    def __init__(
        self, allowance: Allowance, num_prompt_tokens: int, first_tokens: int, growth_tokens: int, num_answers: int
    ) -> None:
        self._allowance = allowance
        self._growth_tokens = growth_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self.first_tokens = first_tokens
        self._sizes = [first_tokens] * num_answers

    @property
    def num_tokens(self) -> int:
        """How many tokens count for the quota: the prompt once, and all answers."""
        return self._num_prompt_tokens + sum(size - self._num_prompt_tokens for size in self._sizes)

    async def grow(self, index: int, session: ChainSession) -> bool:
        """Doubles the room for an answer, or adds to it what quota and pages allow; waits a while for pages.

        Returns False if there is no more room.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + GROWTH_PATIENCE_S
        held = session.num_reserved_tokens
        while True:
            wanted = session.growth_sizes(self._num_prompt_tokens, self._growth_tokens)
            sizes = await self._sizes_within_quota(index, wanted)
            if not sizes:
                return False
            try:
                await session.grow(sizes)
            finally:
                self._sizes[index] = session.num_reserved_tokens
            if session.num_reserved_tokens != sizes[0]:
                await self._allowance.take_reserved(self.num_tokens)
            if session.num_reserved_tokens > held:
                return True
            if clock() >= give_up_s:
                return False
            await asyncio.sleep(random.uniform(0.5, 1.5) * _GROWTH_INTERVAL_S)

    async def _sizes_within_quota(self, index: int, sizes: Sequence[int]) -> Sequence[int]:
        """The sizes that the quota allows, which come with the largest one first; takes the quota for that one."""
        held = self._sizes[index]
        for number, size in enumerate(sizes):
            self._sizes[index] = size
            try:
                await self._allowance.take_reserved(self.num_tokens)
            except QuotaExceeded:
                self._sizes[index] = held
                continue
            return sizes[number:]
        return ()
