"""The data plane as a client service sees it: one stream to each block server, and the answers that are awaited.

A step goes out on the stream to the first hop, its result comes back on the stream to the last one, and a fault on any.
So what is awaited is kept here, for all streams together.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from corolla.chassis.channels import open_channel
from corolla.chassis.errors import CorollaError, HopUnavailable, NonFiniteOutput
from corolla.chassis.lifecycle import TaskGroup
from corolla.chassis.status import from_reason, from_rpc_error
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import blocks_pb2_grpc, common_pb2
from corolla.wire.frames import EXCHANGE, Buffer, decode
from corolla.wire.outbox import Outbox, OutboxFull

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 3.0
_WATCH_INTERVAL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class RowResult:
    """The hidden states that one row of a step gave: raw bytes of `num_tokens` vectors."""

    payload: Buffer
    num_tokens: int
    dtype: int
    hidden_size: int


RowFuture = asyncio.Future[RowResult]


@dataclass(slots=True)
class _AwaitedStep:
    rows: dict[bytes, tuple[pb.StepRow, RowFuture]]
    addresses: frozenset[str]
    since_s: float


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
    """

    def __init__(self, fingerprint: str, probe_after_s: float = 1.0, probe_timeout_s: float = 1.0) -> None:
        self.client_id = secrets.token_bytes(16)
        self._fingerprint = fingerprint
        self._tasks = TaskGroup()
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count(1)
        self._probe_after_s = probe_after_s
        self._probe_timeout_s = probe_timeout_s
        self._watching: asyncio.Task[None] | None = None
        self._opens: dict[int, tuple[str, asyncio.Future[pb.Opened], float]] = {}
        self._steps: dict[int, _AwaitedStep] = {}

    async def connect(self, address: str) -> pb.Welcome:
        """Makes sure that there is a stream to the server, so that results can come back on it.

        Returns:
            What the server said of itself.

        Raises:
            HopUnavailable, FingerprintMismatch
        """
        stream = self._streams.get(address)
        if stream is None:
            stream = _Stream(Outbox(), asyncio.get_running_loop().create_future(), open_channel(address))
            stream.outbox.put(pb.Hello(client_id=self.client_id, fingerprint=self._fingerprint))
            self._streams[address] = stream
            stream.task = self._tasks.start(self._run(address, stream), f"stream to {address}")
            if self._watching is None:
                self._watching = self._tasks.start(self._watch(), "watch over servers")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await asyncio.shield(stream.welcome)
        except TimeoutError:
            raise HopUnavailable("a hop of the chain is not reachable", address) from None

    async def open(self, address: str, request: pb.Open, payload: Buffer = b"") -> tuple[pb.Opened, int]:
        """Opens a session on one hop. Raises what the hop answers, or HopUnavailable.

        Args:
            payload: what `request.block_prompts` describes.

        Returns:
            The answer, and how many tokens a step on this hop may have.
        """
        welcome = await self.connect(address)
        number = next(self._numbers)
        future: asyncio.Future[pb.Opened] = asyncio.get_running_loop().create_future()
        self._opens[number] = (address, future, asyncio.get_running_loop().time())
        try:
            request.request_id = number
            self._send(address, request, payload)
            return await future, welcome.max_tokens_per_frame
        finally:
            del self._opens[number]

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
        loop = asyncio.get_running_loop()
        rows = {row.session_id: (row, loop.create_future()) for row in step.rows}
        self._steps[number] = _AwaitedStep(rows, frozenset(hop.address for hop in hops), loop.time())
        futures = [future for _, future in rows.values()]
        for future in futures:
            future.add_done_callback(lambda _: self._settle(number))
        try:
            self._send(hops[0].address, frame, payload)
        except HopUnavailable as error:
            self._fail(futures, error)
            return futures
        for hop in hops[1:]:
            if hop.address not in self._streams:
                # Its result or fault would find no way back.
                self._fail(futures, HopUnavailable("a hop of the chain was lost", hop.address))
        return futures

    def tell(self, address: str, control: pb.Close | pb.Truncate) -> None:
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

    def _settle(self, number: int) -> None:
        awaited = self._steps.get(number)
        if awaited is not None and all(future.done() for _, future in awaited.rows.values()):
            del self._steps[number]

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
            log.warning("stream to a block server ended", extra={"address": address, "reason": told.reason})
        finally:
            if stream.is_silent:
                error = HopUnavailable("a hop of the chain does not answer", address)
                log.warning("a block server does not answer", extra={"address": address})
            if self._streams.get(address) is stream:
                del self._streams[address]
            stream.outbox.close()
            self._break(address, stream, error)
            await stream.channel.close(None)

    async def _watch(self) -> None:
        """Asks silent servers whether they live, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            overdue_s = clock() - self._probe_after_s
            suspects: set[str] = set()
            for awaited in self._steps.values():
                if awaited.since_s < overdue_s:
                    suspects |= awaited.addresses
            suspects |= {address for address, _, since_s in self._opens.values() if since_s < overdue_s}
            silent = [
                (address, stream)
                for address in suspects
                if (stream := self._streams.get(address)) is not None and stream.heard_s < overdue_s
            ]
            await asyncio.gather(*(self._probe(address, stream) for address, stream in silent))

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
                self._result(control, payload)
            case pb.Opened():
                awaited = self._opens.get(control.request_id)
                if awaited is not None and not awaited[1].done():
                    awaited[1].set_result(control)
            case pb.Fault():
                self._fault(control, address)
            case pb.Welcome():
                if not stream.welcome.done():
                    stream.welcome.set_result(control)
            case _:
                log.warning("a block server sent a frame of a kind that it should not")

    def _result(self, result: pb.Result, payload: Buffer) -> None:
        awaited = self._steps.get(result.step_id)
        if awaited is None:
            return
        view = memoryview(payload)
        num_tokens = sum(row.num_result_tokens for row in result.rows)
        token_bytes = len(view) // num_tokens if num_tokens else 0
        start = 0
        for row in result.rows:
            end = start + row.num_result_tokens * token_bytes
            asked, future = awaited.rows.get(row.session_id, (None, None))
            # The fence: only the answer to just this step of just this epoch counts.
            if asked == row and future is not None and not future.done():
                part = RowResult(view[start:end], row.num_result_tokens, result.dtype, result.hidden_size)
                future.set_result(part)
            start = end

    def _fault(self, fault: pb.Fault, sender: str) -> None:
        metadata = dict(fault.metadata)
        if fault.address:
            metadata["address"] = fault.address
        error = from_reason(fault.reason, fault.message, metadata)
        if isinstance(error, NonFiniteOutput):
            error.address = sender
        if fault.WhichOneof("about") == "request_id":
            opening = self._opens.get(fault.request_id)
            if opening is not None and not opening[1].done():
                opening[1].set_exception(error)
            return
        awaited = self._steps.get(fault.step_id)
        if awaited is None:
            return
        affected = [row.session_id for row in fault.rows] or list(awaited.rows)
        self._fail([awaited.rows[session_id][1] for session_id in affected if session_id in awaited.rows], error)

    def _break(self, address: str, stream: _Stream, error: CorollaError) -> None:
        if not stream.welcome.done():
            stream.welcome.set_exception(error)
            stream.welcome.exception()  # nobody may be waiting
        for opened_at, opened, _ in list(self._opens.values()):
            if opened_at == address and not opened.done():
                opened.set_exception(error)
        for awaited in list(self._steps.values()):
            if address in awaited.addresses:
                self._fail([future for _, future in awaited.rows.values()], error)

    @staticmethod
    def _fail(futures: Sequence[RowFuture], error: CorollaError) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)
