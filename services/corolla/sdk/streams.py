"""Streams of chunks, for threads and for asyncio. Closing one early cancels its call and frees its KV cache."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc
from grpc import aio

from corolla.chassis.ignored_places import ignored_places
from corolla.sdk.answer import Answer
from corolla.sdk.results import Chunk
from corolla.sdk.transport import error_of


class Stream(Answer):
    """Iterates over `Chunk`s. `text`, `token_ids`, `completions`, `finish_reason` and `usage` hold the answer so far.

    Leaving a `with` block, or `close()`, cancels an unfinished answer. Iterating raises the
    errors of `corolla.chassis.errors`.
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__()
        self._call = call
        self._address = address
        self._closed = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._closed:
            raise StopIteration
        try:
            message = next(self._call)
        except StopIteration:
            self._closed = True
            self.ignored = ignored_places(self._call.trailing_metadata())
            raise
        except grpc.RpcError as failure:
            if self._closed:
                raise StopIteration from None
            self._closed = True
            raise error_of(failure, self._address) from None
        return self._add(message)

    def close(self) -> None:
        """Cancels the call if it still runs. May be called from any thread."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        self.close()


class AsyncStream(Answer):
    """`Stream` for asyncio: `async for chunk in stream`, `async with`, `close()`.

    Cancelling the wait for a chunk, for example by a time limit, closes the stream.

    Args:
        call: the call, or a coroutine that starts and returns it; the first read of a chunk awaits the coroutine.
    """

    def __init__(self, call: Any, address: str) -> None:
        super().__init__()
        self._call = call
        self._address = address
        self._closed = False

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            if inspect.iscoroutine(self._call):
                self._call = await self._call
            message = await self._call.read()
        except asyncio.CancelledError:
            self._closed = True
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Other code closed the stream or its client. This task was not cancelled, so its iteration just ends.
            raise StopAsyncIteration from None
        except grpc.RpcError as failure:
            if self._closed:
                raise StopAsyncIteration from None
            self._closed = True
            raise error_of(failure, self._address) from None
        if message is aio.EOF:
            self._closed = True
            self.ignored = ignored_places(await self._call.trailing_metadata())
            raise StopAsyncIteration
        return self._add(message)

    def close(self) -> None:
        """Cancels the call if it still runs."""
        self._closed = True
        if inspect.iscoroutine(self._call):
            self._call.close()
        else:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_failure: object) -> None:
        self.close()
