"""The stream to a block server that takes sessions over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.tasks import until_first_ends
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
    async def connect(self, fingerprint: str) -> AsyncIterator[None]:
        """The stream lasts as long as the context; once it broke, requests raise HopUnavailable."""
        self._outbox.put(pb.Hello(fingerprint=fingerprint))
        channel = self._channels(self.address)
        exchanging = asyncio.create_task(self._exchange(channel))
        try:
            yield
        finally:
            # The writer ends once it has written what was sent last, and the exchange with it.
            self._outbox.close()
            await asyncio.wait({exchanging}, timeout=_FLUSH_TIMEOUT_S)
            exchanging.cancel()
            await asyncio.gather(exchanging, return_exceptions=True)
            await channel.close(None)

    async def request(self, control: pb.Handover | pb.HandoverTokens, payload: Buffer = b"") -> pb.HandoverAnswer:
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

    def send(self, control: pb.Close | pb.Truncate) -> None:
        """Sends a frame that has no answer."""
        if not self._is_broken:
            self._outbox.put(control)

    async def _exchange(self, channel: grpc.aio.Channel) -> None:
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
            await until_first_ends(handover_reader=self._read(call), handover_writer=self._write(call))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # requests raise it
        finally:
            self._is_broken = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._broken())

    async def _read(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        async for message in call:
            for frame in decode(message):
                if isinstance(frame.control, pb.HandoverAnswer):
                    answer = self._answers.get(frame.control.session_id)
                    if answer is not None and not answer.done():
                        answer.set_result(frame.control)

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        async for message in self._outbox.messages():
            await call.write(message)

    def _broken(self) -> HopUnavailable:
        return HopUnavailable("the stream to a block server broke", self.address)
