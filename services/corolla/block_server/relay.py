"""Streams to the next hops: outputs go straight to the server that continues with them."""

import asyncio
import logging

import grpc

from corolla.block_server.peers import PeerTable, step_fault
from corolla.chassis.channels import open_channel
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.lifecycle import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import EXCHANGE, Buffer, decode
from corolla.wire.outbox import Outbox, OutboxFull

log = logging.getLogger(__name__)


class Relay:
    """One stream per next hop, opened at first use and again after it broke."""

    def __init__(self, fingerprint: str, peers: PeerTable) -> None:
        self._fingerprint = fingerprint
        self._peers = peers
        self._tasks = TaskGroup()
        self._outboxes: dict[str, Outbox] = {}

    def forward(self, address: str, step: pb.Step, payload: Buffer) -> None:
        """Queues a step for the next hop; if that cannot be reached, the originating client gets a fault."""
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = self._outboxes[address] = Outbox()
            outbox.put(pb.Hello(fingerprint=self._fingerprint))
            self._tasks.start(self._run(address, outbox), f"relay to {address}")
        try:
            outbox.put(step, payload)
        except OutboxFull:
            self._fault(step, address)
            return

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, address: str, outbox: Outbox) -> None:
        channel = open_channel(address)
        in_flight: list[bytes] = []
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
            reader = asyncio.create_task(self._read(call))
            writer = asyncio.create_task(self._write(call, outbox, in_flight))
            try:
                await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Also when this server stops: neither may outlive the channel that it uses.
                for task in (reader, writer):
                    task.cancel()
                await asyncio.gather(reader, writer, return_exceptions=True)
            log.warning("stream to the next hop ended", extra={"address": address})
        finally:
            if self._outboxes.get(address) is outbox:
                del self._outboxes[address]
            outbox.close()
            await self._refuse_waiting(address, outbox, in_flight)
            await channel.close(None)

    async def _write(
        self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", outbox: Outbox, in_flight: list[bytes]
    ) -> None:
        async for message in outbox.messages():
            in_flight[:] = [message]
            await call.write(message)

    async def _read(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        """The next hop answers clients itself; here come only faults for clients that it has no stream from."""
        async for message in call:
            for frame in decode(message):
                if isinstance(frame.control, pb.Fault):
                    peer = self._peers.get(frame.control.client_id)
                    if peer is not None:
                        peer.send(frame.control)

    async def _refuse_waiting(self, address: str, outbox: Outbox, in_flight: list[bytes]) -> None:
        messages = in_flight + [message async for message in outbox.messages()]
        for message in messages:
            for frame in decode(message):
                if isinstance(frame.control, pb.Step):
                    self._fault(frame.control, address)

    def _fault(self, step: pb.Step, address: str) -> None:
        peer = self._peers.get(step.client_id)
        if peer is not None:
            peer.send(step_fault(step, HopUnavailable("a hop of the chain is not reachable", address)))
