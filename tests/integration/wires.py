"""The connections of one service of a swarm, which a test can cut, listen to, and change what travels on them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc

from corolla.chassis.channels import open_channel
from corolla.chassis.rpc_server import RpcServer
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame, decode, encode, join

Hook = Callable[[str, Frame], Frame]
"""Gets the other end's address and a frame; gives the frame that travels instead. Raises `Cut`: the stream breaks."""


class Cut(Exception):
    """What a hook raises. `is_noticed`: whether the other end sees the stream break, too."""

    def __init__(self, *, is_noticed: bool = True) -> None:
        super().__init__()
        self.is_noticed = is_noticed


class Wires:
    """Gives a service its channels (`open`) and its gRPC server (`listen`).

    Attributes:
        on_sent: hook for each frame before it goes out.
        on_received: hook for each frame that has come in, before the service gets it.
        openings: how often a session was to be opened at each address.
    """

    def __init__(self) -> None:
        self.on_sent: Hook = lambda address, frame: frame
        self.on_received: Hook = lambda address, frame: frame
        self.openings: Counter[str] = Counter()
        self.streams: list[_Stream] = []
        self._listening: list[RpcServer] = []
        self._is_mute = False

    def open(self, address: str) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _Channel(open_channel(address), address, self))

    def listen(self, host: str, port: int, *, with_reflection: bool) -> RpcServer:
        server = RpcServer(host, port, with_reflection=with_reflection)
        self._listening.append(server)
        return server

    async def hang_up(self) -> None:
        """All streams that others have to the service break, and nobody gets another one."""
        for server in self._listening:
            await server.stop(0)

    def mute(self) -> None:
        """No call of the service's own gets through any more. Its streams stay."""
        self._is_mute = True

    def cut(self, address: str) -> None:
        """The service's streams to this address break. It may open others."""
        for stream in self.streams:
            if stream.address == address:
                stream.cut(Cut())

    def check(self) -> None:
        """Raises where no call gets through."""
        if self._is_mute:
            raise _broken()

    def send(self, address: str, message: bytes) -> bytes:
        """The message as it travels."""
        frames = list(decode(message))
        self.openings[address] += sum(isinstance(frame.control, pb.Open) for frame in frames)
        return join([encode(*self.on_sent(address, frame)) for frame in frames])

    def receive(self, address: str, message: bytes) -> bytes:
        """The message as the service gets it."""
        return join([encode(*self.on_received(address, frame)) for frame in decode(message)])


class _Channel:
    """A channel as far as services use it."""

    def __init__(self, channel: grpc.aio.Channel, address: str, wires: Wires) -> None:
        self._channel = channel
        self._address = address
        self._wires = wires
        self._streams: list[_Stream] = []

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        call = self._channel.unary_unary(*method, **options)

        async def call_unless_mute(*request: Any, **of_call: Any) -> Any:
            self._wires.check()
            return await call(*request, **of_call)

        return call_unless_mute

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._channel.unary_stream(*method, **options)

    def stream_stream(self, *method: Any, **options: Any) -> Callable[..., Any]:
        call = self._channel.stream_stream(*method, **options)

        def begin() -> _Stream:
            self._wires.check()
            stream = _Stream(call(), self._address, self._wires)
            self._streams.append(stream)
            self._wires.streams.append(stream)
            return stream

        return begin

    async def close(self, grace: float | None = None) -> None:
        # The other end of a stream whose end it is not to notice would see the channel's.
        if all(stream.may_end for stream in self._streams):
            await self._channel.close(grace)


class _Stream:
    """The caller's end of a stream of frames.

    Attributes:
        may_end: whether the other end may notice that it is over.
    """

    def __init__(self, call: Any, address: str, wires: Wires) -> None:
        self.address = address
        self.may_end = True
        self._call = call
        self._wires = wires
        self._is_cut = asyncio.get_running_loop().create_future()

    def cut(self, how: Cut) -> None:
        self.may_end = how.is_noticed
        if how.is_noticed:
            self._call.cancel()
        if not self._is_cut.done():
            self._is_cut.set_result(None)

    async def write(self, message: bytes) -> None:
        if not self._is_cut.done():
            try:
                message = self._wires.send(self.address, message)
            except Cut as how:
                self.cut(how)
        if self._is_cut.done():
            raise _broken()
        await self._call.write(message)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        messages = aiter(self._call)
        while True:
            reading: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(messages, None))
            # The reader may be cancelled just when its call fails.
            reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            try:
                await asyncio.wait([reading, self._is_cut], return_when=asyncio.FIRST_COMPLETED)
                if self._is_cut.done():
                    raise _broken()
                message = await reading
            finally:
                # To cancel whoever reads would cancel the call.
                if not reading.done() and self.may_end:
                    reading.cancel()
            if message is None:
                return
            try:
                message = self._wires.receive(self.address, message)
            except Cut as how:
                self.cut(how)
                raise _broken() from None
            yield message


def _broken() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "cut by the test"
    )
