"""A peer that does not read what it is sent."""

from google.protobuf.message import Message

from corolla.block_server.peers import Peer
from corolla.chassis.errors import CorollaError, QueueFull
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from tests.unread_stream import UnreadStream


class FullStream(UnreadStream):
    def __init__(self) -> None:
        self.faults: list[CorollaError] = []

    def send(self, control: Message, payload: Buffer = b"") -> None:
        raise QueueFull("full")

    def fail(self, error: CorollaError) -> None:
        self.faults.append(error)


def test_a_peer_that_does_not_read_loses_its_stream() -> None:
    stream = FullStream()
    Peer(b"c", stream).send(pb.Welcome())
    assert [error.reason for error in stream.faults] == [QueueFull.reason]
