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
        self._reader: asyncio.Future[None] | None = None

    @property
    def has_unread_tokens(self) -> bool:
        """Whether some have come that nobody has asked for yet."""
        return bool(self._rounds)

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
        self._wake()
        return True

    def fail(self, row: pb.StepRow, failure: CorollaError) -> None:
        """A row failed. It is of no interest where its tokens have come, or where it is of another epoch."""
        if row.epoch == self.epoch and row.position >= self._position:
            self.end(failure)

    def end(self, failure: CorollaError) -> None:
        """No more tokens come; those that have can still be read."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    async def next(self, timeout_s: float) -> RoundTokens:
        """The next round. Raises what happened to it, or HopUnavailable after `timeout_s`."""
        if not self._rounds and self._failure is None:
            await self._wait(timeout_s)
        if self._rounds:
            return self._rounds.popleft()
        raise self._failure or HopUnavailable("a hop of the chain does not answer")

    async def _wait(self, timeout_s: float) -> None:
        """Until something comes, or for so long. Each token waits here, and `asyncio.timeout` costs far more."""
        if self._reader is not None:
            raise InternalError("a stream of tokens is read by one reader")
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._reader
        finally:
            timer.cancel()
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
