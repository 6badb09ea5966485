"""The stream to a block server that takes sessions over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from corolla.chassis.errors import HopUnavailable
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Connect, Stream, connect

_ANSWER_TIMEOUT_S: Final = 5.0


class HandoverLink:
    """Sends offers and parts to one server and receives its answers. A session has one open request at a time."""

    def __init__(self, address: str, connect: Connect = connect) -> None:
        self.address = address
        self._connect = connect
        self._stream: Stream | None = None
        self._answers: dict[bytes, asyncio.Future[pb.HandoverAnswer]] = {}

    @asynccontextmanager
    async def connect(self, fingerprint: str) -> AsyncIterator[None]:
        """Holds the stream open within the context. If the stream breaks, requests raise HopUnavailable."""
        stream = self._connect(self.address, lambda _: self._receive)
        stream.ended.add_done_callback(lambda _: self._on_ended())
        stream.send(pb.Hello(fingerprint=fingerprint))
        self._stream = stream
        try:
            yield
        finally:
            stream.close()
            await asyncio.wait({stream.ended})

    async def request(self, control: pb.Handover | pb.HandoverTokens, payload: Buffer = b"") -> pb.HandoverAnswer:
        """Sends one frame and waits for its answer. Raises HopUnavailable."""
        if self._stream is None:
            raise self._broken()
        answer = self._answers[control.session_id] = asyncio.get_running_loop().create_future()
        try:
            self._stream.send(control, payload)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answered: pb.HandoverAnswer = await answer
                return answered
        except TimeoutError:
            raise HopUnavailable("a block server does not answer", self.address) from None
        finally:
            del self._answers[control.session_id]

    def send(self, control: pb.Close | pb.Truncate) -> None:
        """Sends a frame that has no answer."""
        if self._stream is not None:
            self._stream.send(control)

    def _receive(self, frame: Frame) -> None:
        if isinstance(frame.control, pb.HandoverAnswer):
            answer = self._answers.get(frame.control.session_id)
            if answer is not None and not answer.done():
                answer.set_result(frame.control)

    def _on_ended(self) -> None:
        self._stream = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._broken())

    def _broken(self) -> HopUnavailable:
        return HopUnavailable("the stream to a block server broke", self.address)
