"""Block servers of a simulated fleet in one process: they register, send heartbeats and open sessions.

    python -m benchmarks.fleet_servers MODEL NUM_SERVERS ROUTER [ROUTER ...]

They compute nothing, so a step that begins an answer is never answered. Each one announces as many beginnings of texts
as it may. The process prints the ids of its servers as JSON once all have joined.
"""

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import grpc
import uvloop

from corolla.block_server.beginnings import MOST_ANNOUNCED
from corolla.chain.control import ControlPlane
from corolla.v1 import blocks_pb2, common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.beginnings import DIGEST_BYTES
from corolla.wire.frames import Frame
from corolla.wire.stream import Receiver, Stream, StreamListener

NUM_BLOCKS: Final = 80
LEASE_MS: Final = 6000
PATIENCE_S: Final = 300.0
_BLOCKS_OF_A_SERVER: Final = 10
_NUM_PAGES: Final = 4096
_JOINS_AT_ONCE: Final = 20


@dataclass(slots=True)
class Server:
    """A block server as routers and client services see it.

    Attributes:
        address: `host:port` of its streams.
        beginnings: those of texts that it announces.
    """

    fingerprint: ClassVar[str] = "f"

    control: ControlPlane
    model: str
    address: str
    server_id: str = field(default_factory=lambda: secrets.token_hex(16))
    num_heartbeats: int = 0
    beginnings: bytes = field(default_factory=lambda: secrets.token_bytes(MOST_ANNOUNCED * DIGEST_BYTES))
    _span: common_pb2.BlockSpan = field(default_factory=common_pb2.BlockSpan)
    _sessions: set[bytes] = field(default_factory=set)
    _joined: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def description(self) -> pb.ServerDescription:
        return pb.ServerDescription(
            server_id=self.server_id, address=self.address, model=self.model, fingerprint=self.fingerprint,
            num_model_blocks=NUM_BLOCKS, capacity_blocks=_BLOCKS_OF_A_SERVER, decode_tokens_per_second=1000.0,
        )  # fmt: skip

    async def join(self) -> None:
        stub: Any = self.control.stub
        joined = await stub.RegisterServer(pb.RegisterServerRequest(server=self.description), timeout=PATIENCE_S)
        self._span = joined.span
        await self.beat()
        self._joined.set()

    async def live(self) -> None:
        """Sends heartbeats once the server has joined, until the task is cancelled."""
        await self._joined.wait()
        while True:
            await asyncio.sleep(LEASE_MS / 4000)
            # Like a real server, it tries again where a router or its store is too busy.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.beat()

    async def beat(self) -> None:
        self.num_heartbeats += 1
        load = pb.ServerLoad(
            num_sessions=len(self._sessions), num_pages=_NUM_PAGES, num_free_pages=_NUM_PAGES,
            max_session_tokens=_NUM_PAGES << 4, heartbeat_number=self.num_heartbeats, beginnings=self.beginnings,
        )  # fmt: skip
        beat = pb.HeartbeatRequest(
            model=self.model, server_id=self.server_id, state=pb.SERVER_STATE_READY, load=load,
            server=self.description, span=self._span,
        )  # fmt: skip
        stub: Any = self.control.stub
        await stub.Heartbeat(beat, timeout=PATIENCE_S)

    def accept(self, stream: Stream) -> Receiver:
        """Answers the frames of a client service."""
        return partial(self._answer, stream)

    def _answer(self, stream: Stream, frame: Frame) -> None:
        match frame.control:
            case blocks_pb2.Hello():
                stream.send(blocks_pb2.Welcome(server_id=self.server_id, span=self._span, max_tokens_per_frame=512))
            case blocks_pb2.Open() as asked:
                self._sessions.add(asked.session_id)
                load = blocks_pb2.HopLoad(
                    num_sessions=len(self._sessions), max_session_tokens=_NUM_PAGES << 4,
                    heartbeat_number=self.num_heartbeats,
                )  # fmt: skip
                stream.send(
                    blocks_pb2.Opened(
                        request_id=asked.request_id, session_id=asked.session_id, epoch=asked.epoch, load=load
                    )
                )
            case blocks_pb2.Close() as closed:
                self._sessions.discard(closed.session_id)


async def join_all(servers: Sequence[Server]) -> None:
    """Lets servers join, a few at a time."""
    for first in range(0, len(servers), _JOINS_AT_ONCE):
        await asyncio.gather(*(each.join() for each in servers[first : first + _JOINS_AT_ONCE]))


async def main(model: str, count: int, routers: Sequence[str]) -> None:
    controls = [ControlPlane(address, model) for address in routers]
    servers: list[Server] = []
    for number in range(count):
        listener = StreamListener("127.0.0.1", 0)
        servers.append(Server(controls[number % len(controls)], model, f"127.0.0.1:{listener.port}"))
        await listener.start(servers[-1].accept)
    # Those that have joined send heartbeats while others join.
    beating = [asyncio.create_task(each.live()) for each in servers]
    await join_all(servers)
    print(json.dumps([each.server_id for each in servers]), flush=True)
    await asyncio.gather(*beating)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
