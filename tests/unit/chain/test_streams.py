"""The client's end of the streams to block servers, against a server that sends only the test's frames."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from corolla.chain.streams import DataPlane
from corolla.chassis.errors import CorollaError, FingerprintMismatch, HopUnavailable, MalformedMessage
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from corolla.wire.stream import Receiver, Stream, StreamCause, StreamListener


class SilentServer:
    """Welcomes every client and sends nothing more; the test ends its streams."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.opens: asyncio.Queue[Stream] = asyncio.Queue()

    def accept(self, stream: Stream) -> Receiver:
        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Hello):
                stream.send(pb.Welcome(max_tokens_per_frame=8))
            elif isinstance(frame.control, pb.Open):
                self.opens.put_nowait(stream)

        return receive


@asynccontextmanager
async def silent_server() -> AsyncIterator[SilentServer]:
    listener = StreamListener("127.0.0.1", 0)
    silent = SilentServer(f"127.0.0.1:{listener.port}")
    await listener.start(silent.accept)
    try:
        yield silent
    finally:
        await listener.close()


@pytest.mark.parametrize(
    "fault, expected",
    [
        (None, HopUnavailable),
        (MalformedMessage("frame", "of another kind"), HopUnavailable),
        (FingerprintMismatch("other weights"), FingerprintMismatch),
    ],
    ids=["lost", "fault of its own", "other weights"],
)
async def test_who_waits_for_a_server_learns_that_its_stream_ended_and_the_next_one_is_new(
    fault: CorollaError | None, expected: type[CorollaError]
) -> None:
    """Whatever a server finds wrong with a stream is nothing that a caller could change, but for other weights."""
    async with silent_server() as server:
        plane = DataPlane("fingerprint", TaskGroup())
        try:
            for _ in range(2):
                opening = asyncio.create_task(plane.open(server.address, pb.Open(session_id=bytes(16))))
                async with asyncio.timeout(30):
                    stream = await server.opens.get()
                    if fault is None:
                        stream.abort(StreamCause.LOST)
                    else:
                        stream.fail(fault)
                    with pytest.raises(expected) as raised:
                        await opening
                assert not isinstance(raised.value, HopUnavailable) or raised.value.address == server.address
        finally:
            await plane.close()


async def test_a_pause_of_this_process_is_no_silence_of_a_server() -> None:
    async with silent_server() as server:
        plane = DataPlane("fingerprint", TaskGroup())
        opening = asyncio.create_task(plane.open(server.address, pb.Open(session_id=bytes(16))))
        try:
            async with asyncio.timeout(30):
                await server.opens.get()
                plane.ask([server.address])
                await asyncio.sleep(0)
                time.sleep(0.5)  # the event loop stands still  # noqa: ASYNC251
                for _ in range(5):
                    assert plane.late_hop([server.address]) is None
                    await asyncio.sleep(0.01)
        finally:
            opening.cancel()
            await plane.close()
