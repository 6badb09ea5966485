"""The tokens of one session as they go round its chain, on their way from the last hop to whoever reads them."""

import asyncio
from collections import deque
from dataclasses import dataclass

from corolla.chassis.errors import CorollaError, HopUnavailable, InternalError
from corolla.v1 import blocks_pb2 as pb


@dataclass(frozen=True, slots=True)
class RoundTokens:
    """What one round of a session gave.

    Attributes:
        num_drafted: draft tokens that it checked.
        sampled: the tokens.
    """

    num_drafted: int
    sampled: pb.SampledRow


class TokenStream:
    """One session's tokens in one epoch, until something goes wrong.

    Args:
        epoch: of the session.
        position: where the first step begins.
        addresses: of all hops.

    Attributes:
        credit_end: steps may begin at positions below this.
    """

    def __init__(self, epoch: int, position: int, credit_end: int, addresses: frozenset[str]) -> None:
        self.epoch = epoch
        self.addresses = addresses
        self.credit_end = credit_end
        self._position = position
        self._rounds: deque[RoundTokens] = deque()
        self._failure: CorollaError | None = None
        self._arrived = asyncio.Event()

    @property
    def num_unread_tokens(self) -> int:
        """Tokens that nobody has asked for yet."""
        return sum(len(each.sampled.tokens) for each in self._rounds)

    def push(self, row: pb.StepRow, sampled: pb.SampledRow) -> bool:
        """Takes what came back for a row; whether it is the one that follows."""
        if row.epoch != self.epoch or row.position != self._position:
            return False
        if not 1 <= len(sampled.tokens) <= row.num_result_tokens:
            self.fail(row, InternalError("the last hop chooses at least one token, and no more than a row has results"))
            return False
        self._position += row.num_tokens - row.num_result_tokens + len(sampled.tokens)
        self._rounds.append(RoundTokens(row.num_result_tokens - 1, sampled))
        self._arrived.set()
        return True

    def fail(self, row: pb.StepRow, failure: CorollaError) -> None:
        """A row failed. It is of no interest where its tokens have come, or where it is of another epoch."""
        if row.epoch == self.epoch and row.position >= self._position:
            self.end(failure)

    def end(self, failure: CorollaError) -> None:
        """No more tokens come; those that have can still be read."""
        if self._failure is None:
            self._failure = failure
        self._arrived.set()

    async def next(self, timeout_s: float) -> RoundTokens:
        """The next round. Raises what happened to it, or HopUnavailable after `timeout_s`."""
        if not self._rounds and self._failure is None:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                raise HopUnavailable("a hop of the chain does not answer") from None
        if self._rounds:
            return self._rounds.popleft()
        if self._failure is None:
            raise InternalError("a stream of tokens is read by one reader")
        raise self._failure
