"""Who is at the other end of a stream, and does not read what it is sent."""

from google.protobuf.message import Message

from corolla.block_server.peers import Peer, PeerTable
from corolla.chassis.errors import CorollaError, QueueFull
from corolla.trust.workload import Role, Workload
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


def test_only_client_services_count_as_such() -> None:
    peers = PeerTable()
    for client_id, role in ((b"c", Role.CLIENT), (b"d", Role.CLIENT), (b"l", Role.LIBRARY), (b"n", None)):
        stream = UnreadStream()
        stream.peer = Workload("test", role, "1") if role is not None else None
        peers.add(Peer(client_id, stream))

    def are_client_services(*client_ids: bytes) -> bool:
        return peers.are_client_services(pb.Next(rows=[pb.StepRow(client_id=each) for each in client_ids]))

    assert are_client_services(b"c", b"d")
    assert are_client_services(b"n")  # nobody is asked
    assert not are_client_services(b"c", b"l")
    assert not are_client_services(b"c", b"gone")
    assert not are_client_services()
    assert peers.are_client_services(pb.Step(client_id=b"c", rows=[pb.StepRow()]))
