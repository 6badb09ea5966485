"""Streams of chunks, for threads and for asyncio. Closing one early cancels the call, which frees its pages."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc
from grpc import aio

from corolla.sdk.answer import Answer
from corolla.sdk.results import Chunk
from corolla.sdk.transport import error_of


class Stream(Answer):
    """Iterates over `Chunk`s; what came so far is in `text`, `token_ids`, `completions`, `finish_reason` and `usage`.

    Leaving a `with` block, or `close()`, cancels what is not finished. Errors of `corolla.errors` are raised while
    iterating.
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

    Where the wait for a chunk is cancelled, as by a time limit, the stream is closed.

    Args:
        call: or a coroutine that gives it; then it begins with the first wait for a chunk.
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
            # Somebody else closed the stream, or its client: an end for whoever iterates, whom nobody cancelled.
            raise StopAsyncIteration from None
        except grpc.RpcError as failure:
            if self._closed:
                raise StopAsyncIteration from None
            self._closed = True
            raise error_of(failure, self._address) from None
        if message is aio.EOF:
            self._closed = True
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
