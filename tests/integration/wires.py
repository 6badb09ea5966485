"""The connections of one service of a swarm, which a test can cut, listen to, and change what travels on them."""

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from corolla.chassis.errors import CorollaError
from corolla.trust.workload import Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.network import Network
from corolla.wire.stream import (
    Accept,
    Receiver,
    Stream,
    StreamCause,
    StreamEnd,
    StreamLimits,
    StreamListener,
    StreamTrust,
)

Hook = Callable[[str, Frame], Frame]
"""Gets the other end's address and a frame; gives the frame that travels instead. Raises `Cut`: the stream breaks."""


class Cut(Exception):
    """What a hook raises. `is_noticed`: whether the other end sees the stream break, too."""

    def __init__(self, *, is_noticed: bool = True) -> None:
        super().__init__()
        self.is_noticed = is_noticed


class Wires:
    """Gives a service its channels (`open`), its streams (`connect`) and the port that takes others' (`listen`).

    Attributes:
        on_sent: hook for each frame before it goes out on a stream that the service began.
        on_received: hook for each frame that has come in on one, before the service gets it.
        on_taken: hook for each frame that has come in on a stream that another one began.
        openings: how often a session was to be opened at each address.
        frozen_since_s: since when nothing goes over the streams to an address.

    Args:
        network: how the service would reach the others without the test.
    """

    def __init__(self, network: Network) -> None:
        self.beneath = network
        self.on_sent: Hook = lambda address, frame: frame
        self.on_received: Hook = lambda address, frame: frame
        self.on_taken: Hook = lambda address, frame: frame
        self.openings: Counter[str] = Counter()
        self._streams: list[_Stream] = []
        self._listening: list[StreamListener] = []
        self.frozen_since_s: dict[str, float] = {}
        self._is_mute = False

    @property
    def network(self) -> Network:
        """The network that the service gets."""
        return replace(self.beneath, channels=self.open, connect=self.connect, listen=self.listen)

    def open(self, address: str) -> grpc.aio.Channel:
        return cast(grpc.aio.Channel, _Channel(self.beneath.channels(address), self))

    def connect(self, address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
        stream = _Stream(address, accept, limits, self)
        self._streams.append(stream)
        if self._is_mute:
            stream.abort()
        return stream

    def listen(self, host: str, port: int) -> StreamListener:
        listener = _Listener(host, port, self)
        self._listening.append(listener)
        return listener

    async def hang_up(self) -> None:
        """Breaks all streams that others have to the service, and lets no new one begin."""
        for listener in self._listening:
            await listener.close()

    def freeze(self, address: str) -> None:
        """Nothing goes over the service's streams to this address, in either direction, until they thaw."""
        self.frozen_since_s[address] = asyncio.get_running_loop().time()

    def thaw(self, address: str) -> None:
        """What was sent meanwhile arrives now, on streams that have not ended."""
        del self.frozen_since_s[address]
        for stream in self._streams:
            if stream.address == address:
                stream.thaw()

    def mute(self) -> None:
        """No call of the service's own gets through any more. Its streams stay."""
        self._is_mute = True

    def cut(self, address: str) -> None:
        """The service's streams to this address break. It may open others."""
        for stream in self._streams:
            if stream.address == address:
                stream.cut(Cut())

    def check(self) -> None:
        """Raises where no call gets through."""
        if self._is_mute:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "cut by the test"
            )


class _Listener(StreamListener):
    def __init__(self, host: str, port: int, wires: Wires) -> None:
        super().__init__(host, port)
        self._wires = wires

    async def start(
        self, accept: Accept, limits: StreamLimits | None = None, *, trust: StreamTrust | None = None
    ) -> None:
        def accept_hooked(stream: Stream) -> Receiver:
            receive = accept(stream)
            return lambda frame: receive(self._wires.on_taken("", frame))

        await super().start(accept_hooked, limits, trust=trust)


class _Channel:
    """A channel as far as services use it."""

    def __init__(self, channel: grpc.aio.Channel, wires: Wires) -> None:
        self._channel = channel
        self._wires = wires

    def unary_unary(self, *method: Any, **options: Any) -> Callable[..., Any]:
        call = self._channel.unary_unary(*method, **options)

        async def call_unless_mute(*request: Any, **of_call: Any) -> Any:
            self._wires.check()
            return await call(*request, **of_call)

        return call_unless_mute

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._channel.unary_stream(*method, **options)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)


class _Stream:
    """The end of a stream that the service began.

    Where the other end is not to notice that it is cut, the connection stays, and nothing goes over it any more.
    """

    def __init__(self, address: str, accept: Accept, limits: StreamLimits | None, wires: Wires) -> None:
        self.address = address
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self._wires = wires
        self._receiver: Receiver | None = None
        self._held: list[Callable[[], None]] = []
        self._stream = wires.beneath.connect(address, lambda _: self._begin(accept), limits)
        self._stream.ended.add_done_callback(lambda ended: self._on_ended(ended.result()))

    @property
    def peer(self) -> Workload | None:
        return self._stream.peer

    @property
    def heard_s(self) -> float:
        return min(self._stream.heard_s, self._wires.frozen_since_s.get(self.address, math.inf))

    @property
    def num_waiting_bytes(self) -> int:
        return self._stream.num_waiting_bytes

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if self.ended.done():
            return
        if self.address in self._wires.frozen_since_s:
            self._held.append(partial(self.send, copy.deepcopy(control), bytes(payload)))
            return
        self._wires.openings[self.address] += isinstance(control, pb.Open)
        try:
            self._stream.send(*self._wires.on_sent(self.address, Frame(control, payload)))
        except Cut as how:
            self.cut(how)

    def close(self) -> None:
        self._stream.close()

    def fail(self, error: CorollaError) -> None:
        self._stream.fail(error)

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        self._stream.abort(cause)

    def thaw(self) -> None:
        held, self._held = self._held, []
        for go_on in held:
            go_on()

    def cut(self, how: Cut) -> None:
        if how.is_noticed:
            self._stream.abort()
        self._on_ended(StreamEnd(StreamCause.LOST))

    def _begin(self, accept: Accept) -> Receiver:
        self._receiver = accept(self)
        return self._receive

    def _receive(self, frame: Frame) -> None:
        if self.ended.done() or self._receiver is None:
            return
        if self.address in self._wires.frozen_since_s:
            self._held.append(partial(self._receive, Frame(frame.control, bytes(frame.payload))))
            return
        try:
            frame = self._wires.on_received(self.address, frame)
        except Cut as how:
            self.cut(how)
            return
        self._receiver(frame)

    def _on_ended(self, end: StreamEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)
