"""The streams of the data plane over gRPC: calls of `BlockService.Exchange`, whose messages are frames."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Literal

import grpc
from google.protobuf.message import Message

from corolla.chassis.channels import Channels
from corolla.chassis.errors import CorollaError, HopUnavailable, QueueFull
from corolla.chassis.handlers import Context
from corolla.chassis.status import cause_of, from_rpc_error
from corolla.chassis.tasks import TaskGroup, until_first_ends
from corolla.wire.frames import Buffer, decode
from corolla.wire.outbox import Outbox, OutboxFull
from corolla.wire.stream import Accept, StreamCause, StreamEnd

log = logging.getLogger(__name__)

EXCHANGE: Final = "/corolla.v1.BlockService/Exchange"
"""Called by its path, because the generated stub would serialise protobufs."""

Owner = Literal["peer", "relay", "stream", "handover"]
"""What a stream is for: a block server's end of any; its own to the next hop; a client service's; a leaving server's.

Its reader and writer have their names by it.
"""


class ExchangeStream:
    """Either end of a call, as a `Stream`; frames sent before the connection stands wait for it.

    Attributes:
        channel: whose connection it has, at the end that began it.
    """

    channel: grpc.aio.Channel

    def __init__(self, accept: Accept, owner: Owner) -> None:
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._outbox = Outbox()
        self._end: StreamEnd | None = None
        self._is_stopped = asyncio.Event()
        self._receive = accept(self)

    def send(self, control: Message, payload: Buffer = b"") -> None:
        try:
            self._outbox.put(control, payload)
        except OutboxFull:
            raise QueueFull("the other end of a stream does not read what it is sent") from None

    def close(self) -> None:
        self._is_first(StreamEnd(StreamCause.CLOSED))
        self._outbox.close()

    def fail(self, error: CorollaError) -> None:
        self._stop(StreamEnd(StreamCause.FAILED, error))

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        self._stop(StreamEnd(cause))

    def _stop(self, end: StreamEnd) -> None:
        self._is_first(end)
        self._outbox.close()
        self._is_stopped.set()

    async def run(self, messages: AsyncIterator[bytes], write: Callable[[bytes], Awaitable[Any]]) -> str:
        """Carries frames both ways until one end stops.

        Returns:
            What gRPC says of the end, for a log line; nothing where this end stopped.
        """
        said = ""
        try:
            await until_first_ends(
                **{
                    f"{self._owner}_reader": self._read(messages),
                    f"{self._owner}_writer": self._write(write),
                    f"{self._owner}_stop": self._is_stopped.wait(),
                }
            )
            if self._is_first(StreamEnd(StreamCause.CLOSED)):
                said = cause_of(None)
        except CorollaError as error:
            if self._is_first(StreamEnd(StreamCause.FAILED, error)):
                said = error.reason
        except (grpc.RpcError, grpc.aio.BaseError) as failure:
            if self._is_first(_end_of(failure)):
                said = cause_of(failure)
        finally:
            # Also when whoever runs it is cancelled, since the other end is gone.
            self._is_first(StreamEnd(StreamCause.LOST))
            self._outbox.close()
            if self._end is not None:
                self.ended.set_result(self._end)
        return said

    def _is_first(self, end: StreamEnd) -> bool:
        """What ends a stream first says how it ended."""
        is_first = self._end is None
        if is_first:
            self._end = end
        return is_first

    async def _read(self, messages: AsyncIterator[bytes]) -> None:
        async for message in messages:
            for frame in decode(message):
                self._receive(frame)

    async def _write(self, write: Callable[[bytes], Awaitable[Any]]) -> None:
        async for message in self._outbox.messages():
            try:
                await write(message)
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                await asyncio.get_running_loop().create_future()  # the call has ended: its reader says how


def _end_of(failure: BaseException) -> StreamEnd:
    error = from_rpc_error(failure, HopUnavailable) if isinstance(failure, grpc.RpcError) else None
    if error is None or isinstance(error, HopUnavailable):
        return StreamEnd(StreamCause.LOST)
    return StreamEnd(StreamCause.FAILED, error)


class Exchanges:
    """Begins streams to block servers.

    Args:
        channels: a connection of its own for each stream.
        tasks: end with their owner.
    """

    def __init__(self, channels: Channels, tasks: TaskGroup, owner: Owner) -> None:
        self._channels = channels
        self._tasks = tasks
        self._owner = owner

    def begin(self, address: str, accept: Accept) -> ExchangeStream:
        """A stream to `host:port`; what is sent before its connection stands waits for it."""
        stream = ExchangeStream(accept, self._owner)
        stream.channel = self._channels(address)
        self._tasks.start(self._run(stream, stream.channel, address), f"{self._owner} to {address}")
        return stream

    async def _run(self, stream: ExchangeStream, channel: grpc.aio.Channel, address: str) -> None:
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
            said = await stream.run(aiter(call), call.write)
            if said:
                log.warning("stream to a block server ended", extra={"address": address, "cause": said})
        finally:
            await channel.close(None)


async def serve(requests: AsyncIterator[bytes], context: Context, accept: Accept) -> None:
    """The handler of the call. Raises what this end found wrong with the stream."""
    stream = ExchangeStream(accept, "peer")
    await stream.run(requests, context.write)
    end = stream.ended.result()
    if end.error is not None:
        raise end.error
