"""What waits for a router's word on an address."""

import asyncio
from collections.abc import Sequence

import pytest
from google.protobuf.message import Message

from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import Peer, PeerTable
from corolla.block_server.relay import MAX_UNSENT_BYTES, Relay
from corolla.chassis.errors import RouteUnknown
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Buffer
from corolla.wire.stream import Receiver, Stream, StreamListener
from tests.integration.waiting import until
from tests.unread_stream import UnreadStream


class Client(UnreadStream):
    """Collects the faults that it is told of."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def send(self, control: Message, payload: Buffer = b"") -> None:
        assert isinstance(control, pb.Fault)
        self.reasons.append(control.reason)


async def silent_router() -> Sequence[router_pb2.PlacedServer]:
    await asyncio.Event().wait()
    return ()


async def test_what_waits_for_a_router_is_bounded_in_bytes() -> None:
    peers, client, tasks = PeerTable(), Client(), TaskGroup()
    peers.add(Peer(b"c", client))
    relay = Relay("weights", peers, lambda message: None, neighbours=Neighbours(silent_router, tasks))
    payload = memoryview(bytes(1 << 20))
    for number in range(MAX_UNSENT_BYTES // len(payload)):
        relay.send(f"a:{number}", pb.Step(client_id=b"c", rows=[pb.StepRow()]), payload)
    assert client.reasons == []
    relay.send("b:1", pb.Step(client_id=b"c", rows=[pb.StepRow()]), b"1")
    assert client.reasons == [RouteUnknown.reason]
    await tasks.close()


@pytest.mark.parametrize("is_there", [True, False])
async def test_only_a_stream_that_breaks_counts_as_lost(is_there: bool) -> None:
    listener, lost = StreamListener("127.0.0.1", 0), list[str]()
    streams = list[Stream]()

    def accept(stream: Stream) -> Receiver:
        streams.append(stream)
        return lambda frame: None

    if is_there:
        await listener.start(accept)
    address = f"127.0.0.1:{listener.port}"
    relay = Relay("weights", PeerTable(), lambda message: None, on_lost=lost.append)
    relay.send(address, pb.Next())

    def are_two() -> bool:
        relay.send(address, pb.Next())
        return len(streams) == 2

    if is_there:
        await until(lambda: bool(streams))
        streams[0].close()
        await until(are_two)
        assert lost == []
        streams[1].abort()
    await until(lambda: lost == [address])
    relay.close()
    await listener.close()
