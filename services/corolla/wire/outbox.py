"""What waits to be written on a stream. One write is in flight at a time; whatever is ready then travels together."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from google.protobuf.message import Message

from corolla.chassis.channels import MAX_FRAME_BYTES
from corolla.wire.frames import Buffer, encode, join

MAX_WAITING_BYTES: Final = 256 << 20
MAX_MESSAGE_BYTES: Final = MAX_FRAME_BYTES // 2


class OutboxFull(Exception):
    """The reader of this stream does not keep up; its owner ends the stream."""


class Outbox:
    """Frames for one stream, in order."""

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._frames: list[tuple[Buffer, ...]] = []
        self._num_waiting_bytes = 0
        self._max_waiting_bytes = max_waiting_bytes
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, control: Message, payload: Buffer = b"") -> None:
        """Queues a frame; frames for a closed outbox are dropped, since nobody will read them.

        Raises:
            OutboxFull: more than the allowed bytes are waiting.
        """
        if self._closed:
            return
        frame = encode(control, payload)
        num_bytes = self._num_waiting_bytes + sum(map(len, frame))
        if num_bytes > self._max_waiting_bytes:
            raise OutboxFull
        self._num_waiting_bytes = num_bytes
        self._frames.append(frame)
        self._wake.set()

    def close(self) -> None:
        """What waits is still written; then `messages` ends."""
        self._closed = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Messages to write, until the outbox is closed and empty."""
        while True:
            await self._wake.wait()
            while self._frames:
                yield self._take()
            if self._closed:
                return
            self._wake.clear()

    def _take(self) -> bytes:
        num_bytes = num_frames = 0
        for frame in self._frames:
            size = sum(map(len, frame))
            if num_frames and num_bytes + size > MAX_MESSAGE_BYTES:
                break
            num_bytes += size
            num_frames += 1
        taken, self._frames = self._frames[:num_frames], self._frames[num_frames:]
        self._num_waiting_bytes -= num_bytes
        return join(taken)
