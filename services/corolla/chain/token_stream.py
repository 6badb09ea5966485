"""The stream of one session's tokens from the last hop to their reader."""

import asyncio
from collections import deque
from dataclasses import dataclass

from corolla.chassis.errors import CorollaError, HopUnavailable, InternalError
from corolla.v1 import blocks_pb2 as pb


@dataclass(frozen=True, slots=True)
class RoundTokens:
    """The result of one round of a session through its chain.

    Attributes:
        num_drafted: how many draft tokens the round checked.
        sampled: the tokens that the last hop chose.
    """

    num_drafted: int
    sampled: pb.SampledRow


class TokenStream:
    """One session's tokens in one epoch, in order, until the stream fails or ends.

    Args:
        position: where the first step begins.
        addresses: the addresses of all hops.

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
        """Tokens have arrived that the reader has not taken yet."""
        return bool(self._rounds)

    @property
    def num_unread_tokens(self) -> int:
        """How many tokens have arrived that the reader has not taken yet."""
        return sum(len(each.sampled.tokens) for each in self._rounds)

    def push(self, row: pb.StepRow, sampled: pb.SampledRow) -> bool:
        """Takes the tokens that came back for a row. Returns False if the row is not the next one of this epoch."""
        if row.epoch != self.epoch or row.position != self._position:
            return False
        if not 1 <= len(sampled.tokens) <= row.num_result_tokens:
            self.fail(row, InternalError("the last hop chose no token, or more tokens than the row has results"))
            return False
        self._position += row.num_tokens - row.num_result_tokens + len(sampled.tokens)
        self._rounds.append(RoundTokens(row.num_result_tokens - 1, sampled))
        self._wake()
        return True

    def fail(self, row: pb.StepRow, failure: CorollaError) -> None:
        """Ends the stream because a row failed; ignores rows of another epoch, and rows whose tokens have come."""
        if row.epoch == self.epoch and row.position >= self._position:
            self.end(failure)

    def end(self, failure: CorollaError) -> None:
        """Ends the stream with a failure. Tokens that have come can still be read."""
        if self._failure is None:
            self._failure = failure
        self._wake()

    async def is_late(self, wait_s: float) -> bool:
        """Waits for a round or a failure, at most `wait_s`. Returns whether neither came."""
        if not self._rounds and self._failure is None:
            await self._wait(wait_s)
        return not self._rounds and self._failure is None

    async def next(self, timeout_s: float) -> RoundTokens:
        """Returns the next round. Raises the failure that ended the stream, or HopUnavailable after `timeout_s`."""
        if not self._rounds and self._failure is None:
            await self._wait(timeout_s)
        if self._rounds:
            return self._rounds.popleft()
        raise self._failure or HopUnavailable("a hop of the chain does not answer")

    async def _wait(self, timeout_s: float) -> None:
        """Waits until a round or a failure comes, at most `timeout_s`.

        This runs for every round, and `asyncio.timeout` would cost far more.
        """
        if self._reader is not None:
            raise InternalError("two readers wait for the same stream of tokens")
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
