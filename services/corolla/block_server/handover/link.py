"""The stream to a block server that takes sessions over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import HopUnavailable
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import EXCHANGE, Buffer, decode
from corolla.wire.outbox import Outbox

_ANSWER_TIMEOUT_S: Final = 5.0
_FLUSH_TIMEOUT_S: Final = 0.5


class HandoverLink:
    """Offers and parts out, answers in; of each session one thing at a time."""

    def __init__(self, address: str, channels: Channels = open_channel) -> None:
        self.address = address
        self._channels = channels
        self._outbox = Outbox()
        self._answers: dict[bytes, asyncio.Future[pb.HandoverAnswer]] = {}
        self._is_broken = False

    @asynccontextmanager
    async def open(self, fingerprint: str) -> AsyncIterator[None]:
        """It lives as long as the context. Whoever asks on a broken one gets HopUnavailable."""
        self._outbox.put(pb.Hello(fingerprint=fingerprint))
        channel = self._channels(self.address)
        tasks: list[asyncio.Task[None]] = []
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
            tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]
            yield
        finally:
            # What was told last is still written.
            self._outbox.close()
            if tasks:
                await asyncio.wait(tasks[1:], timeout=_FLUSH_TIMEOUT_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await channel.close(None)

    async def ask(self, control: pb.Handover | pb.HandoverTokens, payload: Buffer = b"") -> pb.HandoverAnswer:
        """Sends one frame and waits for its answer. Raises HopUnavailable."""
        if self._is_broken:
            raise self._broken()
        answer = self._answers[control.session_id] = asyncio.get_running_loop().create_future()
        try:
            self._outbox.put(control, payload)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answered: pb.HandoverAnswer = await answer
                return answered
        except TimeoutError:
            raise HopUnavailable("a block server does not answer", self.address) from None
        finally:
            del self._answers[control.session_id]

    def tell(self, control: pb.Close | pb.Truncate) -> None:
        """Sends a frame that has no answer."""
        if not self._is_broken:
            self._outbox.put(control)

    async def _read(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        try:
            async for message in call:
                for frame in decode(message):
                    if isinstance(frame.control, pb.HandoverAnswer):
                        answer = self._answers.get(frame.control.session_id)
                        if answer is not None and not answer.done():
                            answer.set_result(frame.control)
        except grpc.RpcError:
            pass  # whoever waits learns of it
        finally:
            self._is_broken = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._broken())

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        async for message in self._outbox.messages():
            await call.write(message)

    def _broken(self) -> HopUnavailable:
        return HopUnavailable("the stream to a block server broke", self.address)
