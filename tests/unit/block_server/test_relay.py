"""What waits for a router's word on an address."""

import asyncio
from collections.abc import Sequence

from google.protobuf.message import Message

from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import Peer, PeerTable
from corolla.block_server.relay import MAX_UNSENT_BYTES, Relay
from corolla.chassis.errors import RouteUnknown
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import router_pb2
from corolla.wire.frames import Buffer
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
