"""Streams to the next hops: outputs go straight to the server that continues with them.

A next hop does not acknowledge steps, so this hop cannot tell which ones were lost when the stream breaks. It then
notifies the clients of all recent ones, and they ignore those that were answered.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from corolla.block_server.peers import PeerTable, step_fault
from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import HopUnavailable
from corolla.chassis.status import cause_of
from corolla.chassis.tasks import TaskGroup, until_first_ends
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import EXCHANGE, Buffer, decode
from corolla.wire.outbox import Outbox, OutboxFull

log = logging.getLogger(__name__)

_NUM_REMEMBERED: Final = 1024
_REMEMBERED_S: Final = 60.0


@dataclass(slots=True)
class _Link:
    """A stream to one next hop, and the steps that went into it lately: when, and their headers."""

    outbox: Outbox = field(default_factory=Outbox)
    sent: deque[tuple[float, pb.Step]] = field(default_factory=lambda: deque(maxlen=_NUM_REMEMBERED))


class Relay:
    """One stream per next hop, opened at first use and again after it broke.

    Args:
        channels: to next hops.
        clock: in seconds.
    """

    def __init__(
        self,
        fingerprint: str,
        peers: PeerTable,
        channels: Channels = open_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fingerprint = fingerprint
        self._peers = peers
        self._channels = channels
        self._clock = clock
        self._tasks = TaskGroup()
        self._links: dict[str, _Link] = {}

    def send(self, address: str, step: pb.Step, payload: Buffer) -> None:
        """Queues a step for the next hop; if that cannot be reached, the originating client gets a fault."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link()
            link.outbox.put(pb.Hello(fingerprint=self._fingerprint))
            self._tasks.start(self._run(address, link), f"relay to {address}")
        try:
            link.outbox.put(step, payload)
        except OutboxFull:
            self._fault(step, address)
            return
        link.sent.append((self._clock(), step))

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, address: str, link: _Link) -> None:
        channel = self._channels(address)
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(EXCHANGE)()
            try:
                await until_first_ends(relay_reader=self._read(call), relay_writer=self._write(call, link.outbox))
                cause = cause_of(None)
            except (grpc.RpcError, asyncio.InvalidStateError) as failure:
                cause = cause_of(failure)
            log.warning("stream to the next hop ended", extra={"address": address, "cause": cause})
        finally:
            if self._links.get(address) is link:
                del self._links[address]
            link.outbox.close()
            oldest_s = self._clock() - _REMEMBERED_S
            for sent_s, step in link.sent:
                if sent_s > oldest_s:
                    self._fault(step, address)
            await channel.close(None)

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", outbox: Outbox) -> None:
        async for message in outbox.messages():
            await call.write(message)

    async def _read(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        """Passes on faults for clients without a stream to the next hop. It answers all others itself."""
        async for message in call:
            for frame in decode(message):
                if isinstance(frame.control, pb.Fault):
                    peer = self._peers.get(frame.control.client_id)
                    if peer is not None:
                        peer.send(frame.control)

    def _fault(self, step: pb.Step, address: str) -> None:
        peer = self._peers.get(step.client_id)
        if peer is not None:
            peer.send(step_fault(step, HopUnavailable("a hop of the chain is not reachable", address)))
