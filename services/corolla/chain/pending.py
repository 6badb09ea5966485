"""Matches the answers of the data plane with the requests that wait for them, whichever stream an answer comes on.

A step leaves on the first hop's stream, its result arrives on the last hop's stream, and a fault may arrive on any.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from corolla.chain.token_stream import TokenStream
from corolla.chassis.errors import CorollaError, HopUnavailable, StaleEpoch
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states `[num_tokens, hidden_size]` as raw bytes in row-major order; `dtype` is the wire's enum value.

    `sampled` is the rest of the row's result, in a step of a session whose tokens the last hop chooses.
    """

    payload: Buffer
    num_tokens: int
    dtype: pb.TensorType.ValueType
    hidden_size: int
    sampled: pb.SampledRow | None = None


RowFuture = asyncio.Future[HiddenStates]


@dataclass(frozen=True, slots=True)
class _Request:
    """A step, with a row and the future of its answer for each session; or an open, whose session has no id here."""

    rows: dict[bytes, tuple[pb.StepRow | None, asyncio.Future[Any]]]
    addresses: frozenset[str]

    def end(self, error: CorollaError) -> None:
        fail([future for _, future in self.rows.values()], error)


class PendingReplies:
    """Holds the steps and opens that have no answer yet, by their numbers, and the token streams, by their sessions.

    Args:
        on_discarded: is called with the number of tokens that came without a reader.
    """

    def __init__(self, on_discarded: Callable[[int], None] = lambda num_tokens: None) -> None:
        self._requests: dict[int, _Request] = {}
        self._token_streams: dict[bytes, TokenStream] = {}
        # All of them by the address of each server that takes part, and then by their number or session.
        self._by_address: dict[str, dict[int | bytes, _Request | TokenStream]] = {}
        self._on_discarded = on_discarded

    def __len__(self) -> int:
        return len(self._requests) + len(self._token_streams)

    def add_token_stream(self, session_id: bytes, stream: TokenStream) -> None:
        """Adds a session's token stream, until `remove_token_stream`. Ends the stream of the session's earlier turn."""
        earlier = self._token_streams.get(session_id)
        if earlier is not None:
            earlier.end(StaleEpoch("another turn of the session has begun"))
            self._drop(session_id, earlier)
        self._token_streams[session_id] = stream
        self._note(session_id, stream)

    def remove_token_stream(self, session_id: bytes, stream: TokenStream) -> None:
        """Removes a stream that has no reader any more, and counts its unread tokens as discarded."""
        if self._token_streams.get(session_id) is stream:
            del self._token_streams[session_id]
            self._drop(session_id, stream)
            self._on_discarded(stream.num_unread_tokens)

    def has_token_stream(self, addresses: frozenset[str]) -> bool:
        """Tokens of a session go round these hops."""
        near = min((self._by_address.get(address, {}) for address in addresses), key=len, default={})
        return any(isinstance(each, TokenStream) and each.addresses == addresses for each in near.values())

    def add_step(self, number: int, rows: Sequence[pb.StepRow], addresses: frozenset[str]) -> list[RowFuture]:
        """Adds a step, until all of its rows are done. Returns one future for each row, in order."""
        loop = asyncio.get_running_loop()
        by_session = {row.session_id: (row, loop.create_future()) for row in rows}
        self._add(number, _Request({**by_session}, addresses))
        futures = [future for _, future in by_session.values()]
        for future in futures:
            future.add_done_callback(lambda _: self._settle(number))
        return futures

    def add_open(self, number: int, address: str) -> asyncio.Future[pb.Opened]:
        """Adds a request to open a session, until `remove_open`. Returns the future of its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._add(number, _Request({b"": (None, answer)}, frozenset([address])))
        return answer

    def remove_open(self, number: int) -> None:
        self._drop(number, self._requests.pop(number))

    def _add(self, number: int, request: _Request) -> None:
        self._requests[number] = request
        self._note(number, request)

    def on_result(self, result: pb.Result, payload: Buffer) -> None:
        """Gives each row's future, or its token stream, its part of a result."""
        if result.step_id == 0:
            for row, sampled in zip(result.rows, result.sampled, strict=False):
                stream = self._token_streams.get(row.session_id)
                if stream is None or not stream.push(row, sampled):
                    self._on_discarded(len(sampled.tokens))
            return
        step = self._requests.get(result.step_id)
        if step is None:
            return
        view = memoryview(payload)
        num_tokens = sum(row.num_result_tokens for row in result.rows)
        token_bytes = len(view) // num_tokens if num_tokens else 0
        start = 0
        for index, row in enumerate(result.rows):
            rest = result.sampled[index] if index < len(result.sampled) else None
            end = start + row.num_result_tokens * token_bytes
            asked, future = step.rows.get(row.session_id, (None, None))
            # The epoch fence: an answer counts only if it has the request's session, epoch and position.
            if asked is not None and _agree(asked, row) and future is not None and not future.done():
                states = HiddenStates(view[start:end], row.num_result_tokens, result.dtype, result.hidden_size, rest)
                future.set_result(states)
            start = end

    def on_opened(self, opened: pb.Opened) -> None:
        opening = self._requests.get(opened.request_id)
        if opening is not None and b"" in opening.rows and not opening.rows[b""][1].done():
            opening.rows[b""][1].set_result(opened)

    def on_fault(self, fault: pb.Fault, error: CorollaError) -> None:
        """Fails the open, rows or token streams that the fault names."""
        is_of_open = fault.WhichOneof("about") == "request_id"
        if not is_of_open and fault.step_id == 0:
            for row in fault.rows:
                if (stream := self._token_streams.get(row.session_id)) is not None:
                    stream.fail(row, error)
            return
        request = self._requests.get(fault.request_id if is_of_open else fault.step_id)
        if request is not None:
            affected = list(request.rows) if is_of_open or not fault.rows else [row.session_id for row in fault.rows]
            fail([request.rows[each][1] for each in affected if each in request.rows], error)

    def on_stream_lost(self, address: str, error: CorollaError) -> None:
        """Fails every open, step and token stream in which the server takes part."""
        for each in list(self._by_address.get(address, {}).values()):
            each.end(error)

    def _settle(self, number: int) -> None:
        step = self._requests.get(number)
        if step is not None and all(future.done() for _, future in step.rows.values()):
            del self._requests[number]
            self._drop(number, step)

    def _note(self, key: int | bytes, waiting: _Request | TokenStream) -> None:
        for address in waiting.addresses:
            self._by_address.setdefault(address, {})[key] = waiting

    def _drop(self, key: int | bytes, waiting: _Request | TokenStream) -> None:
        for address in waiting.addresses:
            there = self._by_address[address]
            del there[key]
            if not there:
                del self._by_address[address]


def _agree(asked: pb.StepRow, answered: pb.StepRow) -> bool:
    """The answer is for the same tokens in the same epoch as the row that was sent."""
    return (asked.epoch, asked.position, asked.num_tokens, asked.num_result_tokens) == (
        answered.epoch, answered.position, answered.num_tokens, answered.num_result_tokens
    )  # fmt: skip


def fail(futures: Iterable[asyncio.Future[Any]], error: CorollaError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


async def wait_for_result(future: RowFuture, timeout_s: float) -> HiddenStates:
    """Returns a row's hidden states. Raises HopUnavailable after `timeout_s`, or the error that failed the row."""
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError:
        raise HopUnavailable("a hop of the chain does not answer") from None


def discard(futures: Iterable[RowFuture]) -> None:
    """Drops futures that have no waiter any more, with their results and errors."""
    for future in futures:
        if not future.cancel() and not future.cancelled():
            future.exception()  # marks it as seen: asyncio would log it otherwise
