"""A chain of processes that only pass bytes on, over the streams that block servers use: the floor of a hop's cost.

    python -m benchmarks.forwarder [ADDRESS OF THE NEXT ONE]

Prints its port. The first message of a stream says who calls: a client gets what reaches the last process.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Final, Self

import grpc
import uvloop

from corolla.chassis.channels import bind, new_server, open_channel

_PATH: Final = "/corolla.bench.Forwarder/Exchange"
_CLIENT: Final = b"client"
_HOP: Final = b"hop"

_Call = grpc.aio.StreamStreamCall[bytes, bytes]


class _Forwarder:
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


class Forwarders:
    """Processes in a row, and a client of them.

    Args:
        num_hops: at least 1.
    """

    def __init__(self, num_hops: int) -> None:
        self._num_hops = num_hops
        self._processes: list[subprocess.Popen[str]] = []
        self._addresses: list[str] = []

    def __enter__(self) -> Self:
        for _ in range(self._num_hops):
            command = [sys.executable, "-m", "benchmarks.forwarder", *self._addresses[:1]]
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
        """Of a message through all of them, in microseconds; one at a time."""
        return uvloop.run(self._round_trip_us(bytes(message_bytes), num_messages))

    async def _round_trip_us(self, message: bytes, num_messages: int) -> float:
        async with contextlib.AsyncExitStack() as stack:
            ends: dict[str, _Call] = {}
            for address in {self._addresses[0], self._addresses[-1]}:
                ends[address] = _stream(await stack.enter_async_context(open_channel(address)))
                await ends[address].write(_CLIENT)
                await ends[address].read()
            first, last = ends[self._addresses[0]], ends[self._addresses[-1]]
            started_s = time.perf_counter()
            for _ in range(num_messages):
                await first.write(message)
                await last.read()
            return 1e6 * (time.perf_counter() - started_s) / num_messages


def _stream(channel: grpc.aio.Channel) -> _Call:
    call: Any = channel.stream_stream(_PATH)()
    return call  # type: ignore[no-any-return]


async def _serve(next_address: str | None) -> None:
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


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1] if len(sys.argv) > 1 else None))
