"""A chain of processes that only pass bytes on, over the streams of a data plane: the floor of a hop's cost.

    python -m benchmarks.forwarder TRANSPORT [ADDRESS OF THE NEXT ONE]

TRANSPORT is `grpc`, `framed` (`wire/stream` over TCP) or the folder of a certificate (the same over TLS). Prints its
port. The first message of a stream says who calls: a client gets what reaches the last process.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import grpc
import uvloop

from corolla.chassis.channels import bind, new_server, open_channel
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream, StreamListener, connect

GRPC: Final = "grpc"
FRAMED: Final = "framed"

_PATH: Final = "/corolla.bench.Forwarder/Exchange"
_CLIENT: Final = b"client"
_HOP: Final = b"hop"

_Call = grpc.aio.StreamStreamCall[bytes, bytes]
_RoundTrip = Callable[[bytes], Awaitable[None]]


class _Forwarder:
    """Over gRPC."""

    def __init__(self, next_address: str | None) -> None:
        self._next_address = next_address
        self._onward: _Call | None = None
        self._client: grpc.aio.ServicerContext[bytes, bytes] | None = None

    async def exchange(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if await anext(aiter(messages)) == _CLIENT:
            self._client = context
            await context.write(_CLIENT)
        async for message in messages:
            if self._next_address is not None:
                await (await self._call()).write(message)
            elif self._client is not None:
                await self._client.write(message)

    async def _call(self) -> _Call:
        if self._onward is None:
            self._onward = _stream(open_channel(self._next_address or ""))
            await self._onward.write(_HOP)
        return self._onward


class _FramedForwarder:
    """Over framed streams."""

    def __init__(self) -> None:
        self.onward: Stream | None = None
        self._client: Stream | None = None

    def accept(self, stream: Stream) -> Receiver:
        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Hello):
                if frame.control.client_id == _CLIENT:
                    self._client = stream
                    stream.send(pb.Welcome())
            elif (following := self.onward or self._client) is not None:
                following.send(*frame)

        return receive


class Forwarders:
    """Processes in a row, and a client of them.

    Args:
        num_hops: at least 1.
        transport: `GRPC`, `FRAMED`, or the folder of a block server's certificate.
    """

    def __init__(self, num_hops: int, transport: str = GRPC) -> None:
        self._num_hops = num_hops
        self._transport = transport
        self._processes: list[subprocess.Popen[str]] = []
        self._addresses: list[str] = []

    def __enter__(self) -> Self:
        for _ in range(self._num_hops):
            command = [sys.executable, "-m", "benchmarks.forwarder", self._transport, *self._addresses[:1]]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._processes.append(process)
            if process.stdout is None or not (port := process.stdout.readline()):
                raise RuntimeError("a forwarder did not start")
            self._addresses.insert(0, f"127.0.0.1:{port.strip()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def round_trip_us(self, message_bytes: int, num_messages: int) -> float:
        """The time of a message through all forwarders, in microseconds; one message travels at a time."""
        return _loop().run_until_complete(self._round_trip_us(bytes(message_bytes), num_messages))

    async def _round_trip_us(self, message: bytes, num_messages: int) -> float:
        async with contextlib.AsyncExitStack() as stack:
            over = self._over_grpc if self._transport == GRPC else self._over_frames
            round_trip = await over(stack)
            started_s = time.perf_counter()
            for _ in range(num_messages):
                await round_trip(message)
            return 1e6 * (time.perf_counter() - started_s) / num_messages

    async def _over_grpc(self, stack: contextlib.AsyncExitStack) -> _RoundTrip:
        ends: dict[str, _Call] = {}
        for address in {self._addresses[0], self._addresses[-1]}:
            ends[address] = _stream(await stack.enter_async_context(open_channel(address)))
            await ends[address].write(_CLIENT)
            await ends[address].read()
        first, last = ends[self._addresses[0]], ends[self._addresses[-1]]

        async def round_trip(message: bytes) -> None:
            await first.write(message)
            await last.read()

        return round_trip

    async def _over_frames(self, stack: contextlib.AsyncExitStack) -> _RoundTrip:
        arrived = asyncio.Event()
        ends: dict[str, Stream] = {}
        for address in {self._addresses[0], self._addresses[-1]}:
            trust = _network(self._transport).servers
            ends[address] = stream = connect(address, lambda _: lambda _: arrived.set(), trust=trust)
            stack.callback(stream.close)
            stream.send(pb.Hello(client_id=_CLIENT))
            await arrived.wait()
            arrived.clear()
        first, result = ends[self._addresses[0]], pb.Result(step_id=1)

        async def round_trip(message: bytes) -> None:
            first.send(result, message)
            await arrived.wait()
            arrived.clear()

        return round_trip


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all measurements, never closed: gRPC delivers events to each loop that it has seen."""
    return uvloop.new_event_loop()


def _network(transport: str) -> Network:
    return Network.from_folder(None if transport == FRAMED else Path(transport))


def _stream(channel: grpc.aio.Channel) -> _Call:
    call: Any = channel.stream_stream(_PATH)()
    return call  # type: ignore[no-any-return]


async def _serve(transport: str, next_address: str | None) -> None:
    if transport == GRPC:
        await _serve_grpc(next_address)
    else:
        await _serve_frames(transport, next_address)


async def _serve_grpc(next_address: str | None) -> None:
    service, _, method = _PATH.removeprefix("/").partition("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
        _Forwarder(next_address).exchange
    )
    server = new_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


async def _serve_frames(transport: str, next_address: str | None) -> None:
    forwarder = _FramedForwarder()
    if next_address is not None:
        forwarder.onward = connect(next_address, lambda _: lambda _: None, trust=_network(transport).servers)
        forwarder.onward.send(pb.Hello(client_id=_HOP))
    listener = StreamListener("127.0.0.1", 0)
    await listener.start(forwarder.accept, trust=_network(transport).callers)
    print(listener.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
