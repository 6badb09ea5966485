"""A stream whose other end reads nothing."""

import asyncio

from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError
from corolla.trust.workload import Workload
from corolla.wire.frames import Buffer
from corolla.wire.stream import StreamCause, StreamEnd


class UnreadStream:
    """It never ends, either."""

    ended: asyncio.Future[StreamEnd]
    peer: Workload | None = None
    heard_s = 0.0
    num_waiting_bytes = 0

    def send(self, control: Message, payload: Buffer = b"") -> None:
        pass

    def close(self) -> None:
        pass

    def fail(self, error: CorollaError) -> None:
        pass

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        pass
