"""The data plane as a client service sees it: one stream to each block server, and who among them is silent."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from corolla.chassis.channels import Channels, open_channel
from corolla.chassis.errors import CorollaError, HopLeaving, HopUnavailable, NonFiniteOutput
from corolla.chassis.lifecycle import TaskGroup
from corolla.chassis.status import cause_of, from_reason, from_rpc_error
from corolla.client.chain.awaited import Awaited, RowFuture, fail
from corolla.client.chain.moves import Moves
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import blocks_pb2_grpc, common_pb2
from corolla.wire.frames import EXCHANGE, Buffer, decode
from corolla.wire.outbox import Outbox, OutboxFull

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 3.0
_WATCH_INTERVAL_S: Final = 0.25


@dataclass(slots=True)
class _Stream:
    outbox: Outbox
    welcome: asyncio.Future[pb.Welcome]
    channel: grpc.aio.Channel
    task: asyncio.Task[None] | None = None
    # When a frame came in on it.
    heard_s: float = 0.0
    is_silent: bool = False


class DataPlane:
    """All streams of this client service.

    A step that takes long says nothing about why: a server may be busy or gone without a word. So the servers that have
    not been heard of for a while are asked whether they live; one that does not say so loses its stream, and whoever
    waits for it learns that at once.

    Args:
        fingerprint: the weights and protocol that every server must have.
        probe_after_s: how long a server may be silent while something is awaited from it.
        probe_timeout_s: how long it may take to say that it lives.
        open_timeout_s: how long a server that lives may take to open a session. Its event loop may be well while the
            thread that computes is stuck.
        channels: to servers.
    """

    def __init__(
        self,
        fingerprint: str,
        probe_after_s: float = 1.0,
        probe_timeout_s: float = 1.0,
        open_timeout_s: float = 15.0,
        channels: Channels = open_channel,
    ) -> None:
        self.client_id = secrets.token_bytes(16)
        self._fingerprint = fingerprint
        self._channels = channels
        self._tasks = TaskGroup()
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count(1)
        self._probe_after_s = probe_after_s
        self._probe_timeout_s = probe_timeout_s
        self._open_timeout_s = open_timeout_s
        self._watching: asyncio.Task[None] | None = None
        self._awaited = Awaited()
        self.moves = Moves()

    @property
    def num_awaited(self) -> int:
        """Steps and openings without an answer yet."""
        return len(self._awaited)

    async def connect(self, address: str) -> pb.Welcome:
        """Makes sure that there is a stream to the server, so that results can come back on it.

        Returns:
            What the server said of itself.

        Raises:
            HopUnavailable, FingerprintMismatch
        """
        stream = self._streams.get(address)
        if stream is None:
            stream = _Stream(Outbox(), asyncio.get_running_loop().create_future(), self._channels(address))
            stream.outbox.put(pb.Hello(client_id=self.client_id, fingerprint=self._fingerprint))
            self._streams[address] = stream
            self.moves.reachable(address, is_so=True)
            stream.task = self._tasks.start(self._run(address, stream), f"stream to {address}")
            if self._watching is None:
                self._watching = self._tasks.start(self._watch(), "watch over servers")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await asyncio.shield(stream.welcome)
        except TimeoutError:
            raise HopUnavailable("a hop of the chain is not reachable", address) from None

    def page_tokens(self, address: str) -> int:
        """Tokens of the pages that a connected server reuses; 0 where it reuses none, or is gone."""
        stream = self._streams.get(address)
        return stream.welcome.result().page_tokens if stream is not None and _is_welcome(stream) else 0

    async def _greet(self, address: str) -> None:
        with contextlib.suppress(CorollaError):  # whoever needs the server learns of it
            await self.connect(address)

    async def open(self, address: str, request: pb.Open, payload: Buffer = b"") -> tuple[pb.Opened, int]:
        """Opens a session on one hop. Raises what the hop answers, or HopUnavailable.

        A hop that did not answer in time may open it later: it is to be told that nobody wants it any more.

        Args:
            payload: what `request.block_prompts` describes.

        Returns:
            The answer, and how many tokens a step on this hop may have.
        """
        welcome = await self.connect(address)
        number = next(self._numbers)
        answer = self._awaited.opening(number, address)
        try:
            request.request_id = number
            self._send(address, request, payload)
            async with asyncio.timeout(self._open_timeout_s):
                return await answer, welcome.max_tokens_per_frame
        except TimeoutError:
            raise HopUnavailable("a hop of the chain does not answer", address) from None
        finally:
            self._awaited.opened_or_not(number)

    def step(self, hops: Sequence[common_pb2.Hop], step: pb.Step, payload: Buffer) -> list[RowFuture]:
        """Sends a step through the chain; one future for each of its rows, in order.

        Args:
            hops: all hops of the chain.
            step: rows, dtype and hidden size; the rest is filled in here.
            payload: the rows' hidden states, one after the other.
        """
        step.blocks.CopyFrom(hops[0].span)
        step.route.extend(hops[1:])
        return self._await_rows(hops, step, step, payload)

    def resend(self, source: common_pb2.Hop, hops: Sequence[common_pb2.Hop], step: pb.Step) -> list[RowFuture]:
        """Like `step`, where `source` puts in what it kept of its outputs."""
        step.blocks.CopyFrom(source.span)
        step.route.extend(hops)
        return self._await_rows([source, *hops], step, pb.Resend(step=step), b"")

    def _await_rows(
        self, hops: Sequence[common_pb2.Hop], step: pb.Step, frame: pb.Step | pb.Resend, payload: Buffer
    ) -> list[RowFuture]:
        header = frame.step if isinstance(frame, pb.Resend) else frame
        header.step_id = number = next(self._numbers)
        header.client_id = self.client_id
        futures = self._awaited.step(number, step.rows, frozenset(hop.address for hop in hops))
        try:
            self._send(hops[0].address, frame, payload)
        except HopUnavailable as error:
            fail(futures, error)
            return futures
        for hop in hops[1:]:
            if hop.address not in self._streams:
                # Its result or fault would find no way back.
                fail(futures, HopUnavailable("a hop of the chain was lost", hop.address))
        return futures

    def tell(self, address: str, control: pb.Close | pb.Truncate | pb.Holds) -> None:
        """Sends a frame that has no answer. A server that is gone has nothing left to free."""
        stream = self._streams.get(address)
        if stream is not None:
            with contextlib.suppress(OutboxFull):
                stream.outbox.put(control)

    async def close(self) -> None:
        for stream in self._streams.values():
            stream.outbox.close()
        await self._tasks.close()

    def _send(self, address: str, control: pb.Open | pb.Step | pb.Resend, payload: Buffer = b"") -> None:
        stream = self._streams.get(address)
        if stream is None:
            raise HopUnavailable("a hop of the chain is not reachable", address)
        try:
            stream.outbox.put(control, payload)
        except OutboxFull:
            raise HopUnavailable("a hop of the chain does not keep up", address) from None

    async def _run(self, address: str, stream: _Stream) -> None:
        """Lives as long as the stream; whoever waits for something from it then learns that it broke."""
        clock = asyncio.get_running_loop().time
        error: CorollaError = HopUnavailable("a hop of the chain was lost", address)
        try:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = stream.channel.stream_stream(EXCHANGE)()
            writer = asyncio.create_task(self._write(call, stream.outbox))
            try:
                async for message in call:
                    stream.heard_s = clock()
                    for frame in decode(message):
                        self._receive(frame.control, frame.payload, stream, address)
            finally:
                writer.cancel()
        except grpc.RpcError as failure:
            told = from_rpc_error(failure, HopUnavailable)
            if not isinstance(told, HopUnavailable):
                error = told
            log.warning(
                "stream to a block server ended",
                extra={"address": address, "reason": told.reason, "cause": cause_of(failure)},
            )
        finally:
            if stream.is_silent:
                error = HopUnavailable("a hop of the chain does not answer", address)
                log.warning("a block server does not answer", extra={"address": address})
            if self._streams.get(address) is stream:
                del self._streams[address]
            stream.outbox.close()
            if not stream.welcome.done():
                stream.welcome.set_exception(error)
                stream.welcome.exception()  # nobody may be waiting
            self.moves.reachable(address, is_so=False)
            self._awaited.lost(address, error)
            await stream.channel.close(None)

    async def _watch(self) -> None:
        """Asks silent servers whether they live, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            overdue_s = clock() - self._probe_after_s
            silent = [
                (address, stream)
                for address in self._awaited.overdue(overdue_s)
                if (stream := self._streams.get(address)) is not None and stream.heard_s < overdue_s
            ]
            # A channel that is closed while its server is asked cancels the call: that must not end the watch.
            await asyncio.gather(*(self._probe(address, stream) for address, stream in silent), return_exceptions=True)

    async def _probe(self, address: str, stream: _Stream) -> None:
        """Cuts a server off that does not say that it lives. Its event loop answers, however busy it computes."""
        stub = blocks_pb2_grpc.BlockServiceStub(stream.channel)
        try:
            await stub.GetStatus(pb.GetBlockServerStatusRequest(), timeout=self._probe_timeout_s)
            stream.heard_s = asyncio.get_running_loop().time()
        except grpc.RpcError:
            stream.is_silent = True
            if stream.task is not None:
                stream.task.cancel()

    async def _write(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]", outbox: Outbox) -> None:
        async for message in outbox.messages():
            await call.write(message)

    def _receive(self, control: object, payload: Buffer, stream: _Stream, address: str) -> None:
        match control:
            case pb.Result():
                self._awaited.result(control, payload)
            case pb.Opened():
                self._awaited.opened(control)
            case pb.Fault():
                error = _error_of(control, address)
                if isinstance(error, HopLeaving):
                    self.moves.refused(address)
                self._awaited.fault(control, error)
            case pb.Moved():
                self.moves.told(control, address)
                if control.HasField("hop") and control.hop.address not in self._streams:
                    # The session is opened there soon, or closed.
                    self._tasks.start(self._greet(control.hop.address), "connection to a server")
            case pb.Welcome():
                if not stream.welcome.done():
                    stream.welcome.set_result(control)
            case _:
                log.warning("a block server sent a frame of a kind that it should not")


def _error_of(fault: pb.Fault, sender: str) -> CorollaError:
    metadata = dict(fault.metadata)
    if fault.address:
        metadata["address"] = fault.address
    error = from_reason(fault.reason, fault.message, metadata)
    if isinstance(error, NonFiniteOutput | HopLeaving):
        error.address = sender
    elif isinstance(error, HopUnavailable) and error.address != sender:
        error.reporter = sender
    return error


def _is_welcome(stream: _Stream) -> bool:
    return stream.welcome.done() and not stream.welcome.cancelled() and stream.welcome.exception() is None
