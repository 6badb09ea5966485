"""The other end of a stream: whether it is a client service, and what happens where it does not read."""

import pytest
from google.protobuf.message import Message

from corolla.block_server.peers import Peer, PeerTable
from corolla.chassis.errors import CorollaError, MalformedMessage, QueueFull
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.stream import StreamCause
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
    assert are_client_services(b"n")  # without certificates every peer counts
    assert not are_client_services(b"c", b"l")
    assert not are_client_services(b"c", b"gone")
    assert not are_client_services()
    assert peers.are_client_services(pb.Step(client_id=b"c", rows=[pb.StepRow()]))


class SentStream(UnreadStream):
    """Remembers what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_aborted = False

    def send(self, control: Message, payload: Buffer = b"") -> None:
        self.sent.append(control)

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        self.is_aborted = True


def test_a_peer_goes_over_to_another_connection_and_stays_who_it_is() -> None:
    old, new, peers = SentStream(), SentStream(), PeerTable()
    peer = Peer(b"c", old, b"s")
    peers.add(peer)
    assert peers.named(b"s") is peer
    peer.expect(new)
    peer.send(pb.Opened())
    peer.go_over()
    peer.send(pb.Moved())
    assert (old.sent, new.sent) == ([pb.Opened(), pb.GoAway(is_last=True)], [pb.Moved()])
    assert not peer.lose(old)
    assert peer.lose(new)
    peers.remove(peer)
    assert peers.named(b"s") is None


def test_a_peer_is_gone_with_its_connection_whatever_was_to_follow() -> None:
    old, failed, following = SentStream(), SentStream(), SentStream()
    peer = Peer(b"c", old, b"s")
    peer.expect(failed)
    assert not peer.lose(failed)
    with pytest.raises(MalformedMessage):
        peer.go_over()
    peer.expect(following)
    assert peer.lose(old)
    assert following.is_aborted
