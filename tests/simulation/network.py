"""gRPC and the streams of the data plane without sockets, on a network that is slow, cut or broken.

Connections are those of TCP: bytes come in order or not at all. A connection whose other end is silent for longer than
its kind bears is given up by both ends; what was under way is lost. A frozen process still receives into its
buffers, and reads them when it wakes up, before it learns that its connections are gone.
"""

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from functools import partial
from typing import Any, Final, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from corolla.chassis.channels import Channels
from corolla.chassis.errors import CorollaError, InternalError
from corolla.trust.workload import Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, encode
from corolla.wire.stream import Accept, Connect, Receiver, Stream, StreamCause, StreamEnd, StreamLimits
from tests.frame_bytes import decode, join
from tests.simulation.loop import Process, VirtualLoop

KEEPALIVE_S: Final = 3.0
"""How long gRPC bears a silent end."""
STREAM_SILENCE_S: Final = 2.0
"""How long the streams of the data plane bear a silent end."""
CONNECT_TIMEOUT_S: Final = 2.0
_CONNECT_RETRY_S: Final = 0.1
_WAKING_S: Final = 0.02
_TICK_S: Final = 1e-6

Tamper = Callable[[Process, Process, bytes, bool], bytes]
"""What becomes of a message of a stream on its way from a process to another one, and whether it comes a second time.

A copy that becomes nothing does not come.
"""


class Network:
    """All connections.

    Args:
        seed: of delays and duplicates. Each link has a stream of its own, so that the order of events at one moment
            does not change what others draw.
    """

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.tamper: Tamper = lambda _sender, _receiver, message, _is_copy: message
        self._seed = seed
        self._links: dict[tuple[str, str], _Link] = {}
        self._endpoints: dict[str, list[_Endpoint]] = {}
        self._connections: list[_Connection] = []
        self._numbers = itertools.count()

    def listen(self, address: str, process: Process, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """The process answers calls to an address; several may do so."""
        self._add(address, _Endpoint(process, tuple(handlers)))

    def take_streams(self, address: str, process: Process, accept: Accept) -> None:
        """The process takes streams at an address."""
        self._add(address, _Endpoint(process, (), accept))

    def _add(self, address: str, endpoint: "_Endpoint") -> None:
        live = [each for each in self._endpoints.get(address, []) if not each.process.is_dead]
        self._endpoints[address] = [*live, endpoint]

    def streams(self, process: Process) -> Connect:
        """Begins streams of a process."""

        def connect(address: str, accept: Accept, limits: StreamLimits | None = None) -> Stream:
            return _Streaming(self.connect(process, address, STREAM_SILENCE_S), accept).client

        return connect

    def channels(self, process: Process) -> Channels:
        """Opens channels of a process."""
        return lambda address: cast(aio.Channel, _Channel(self, process, address))

    def link(self, sender: str, receiver: str) -> "_Link":
        """One direction between two processes, by their names."""
        key = (sender, receiver)
        if key not in self._links:
            self._links[key] = _Link(random.Random(f"{self._seed} {sender} {receiver}"))
        return self._links[key]

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        """Delays one direction for a while. Messages arrive later, unless the connection is given up before."""
        link = self.link(sender, receiver)
        link.cut_until_s = max(link.cut_until_s, self.loop.time() + seconds)
        for silence_s in (STREAM_SILENCE_S, KEEPALIVE_S):
            if seconds > silence_s:
                self.loop.at(self.loop.time() + silence_s, partial(self.reset, sender, receiver, silence_s))

    def reset(self, one: str, other: str, silence_s: float = math.inf) -> None:
        """Breaks the connections of two processes that bear no more silence than this; what is under way is lost."""
        for connection in list(self._connections):
            if {connection.client.name, connection.server.name} == {one, other} and connection.silence_s <= silence_s:
                connection.give_up()

    def freeze(self, process: Process) -> None:
        """The others lose patience with a process that is frozen for too long."""
        process.freeze()
        number = process.num_freezes

        def lose_patience(silence_s: float) -> None:
            if process.is_frozen and process.num_freezes == number:
                self._give_up(process, silence_s)

        for silence_s in (STREAM_SILENCE_S, KEEPALIVE_S):
            self.loop.at(self.loop.time() + silence_s, partial(lose_patience, silence_s))

    def kill(self, process: Process) -> None:
        """The process ends, and its machine says so to all others."""
        process.kill()
        for connection in list(self._connections):
            if process in (connection.client, connection.server):
                connection.hang_up(process)

    def connect(self, client: Process, address: str, silence_s: float = KEEPALIVE_S) -> "_Connection":
        connection = _Connection(self, client, address, next(self._numbers), silence_s)
        self._connections.append(connection)
        return connection

    def endpoint(self, address: str, number: int) -> "_Endpoint | None":
        live = [each for each in self._endpoints.get(address, []) if not each.process.is_dead]
        return live[number % len(live)] if live else None

    def forget(self, connection: "_Connection") -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def _give_up(self, process: Process, silence_s: float) -> None:
        for connection in list(self._connections):
            if process in (connection.client, connection.server) and connection.silence_s <= silence_s:
                connection.give_up()


class _Link:
    """One direction between two processes."""

    def __init__(self, stream: random.Random) -> None:
        self.stream = stream
        self.cut_until_s = 0.0
        self.slow_until_s = 0.0
        self.repeats_until_s = 0.0

    def delay_s(self, now_s: float) -> float:
        seconds = self.stream.uniform(0.0002, 0.002)
        if now_s < self.slow_until_s:
            seconds += self.stream.expovariate(1 / 0.3)
        return seconds

    def repeats(self, now_s: float) -> bool:
        return now_s < self.repeats_until_s and self.stream.random() < 0.3


class _Endpoint:
    def __init__(
        self, process: Process, handlers: tuple[grpc.GenericRpcHandler, ...], accept: Accept | None = None
    ) -> None:
        self.process = process
        self.accept = accept
        self._handlers = handlers

    def handler(self, method: str) -> Any:
        details = cast(grpc.HandlerCallDetails, _Details(method))
        found = (each.service(details) for each in self._handlers)
        return next((each for each in found if each is not None), None)


class _Details:
    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class _Connection:
    """One channel's connection to one server, shared by its calls; or that of one stream."""

    def __init__(self, network: Network, client: Process, address: str, number: int, silence_s: float) -> None:
        self.network = network
        self.silence_s = silence_s
        self.client = client
        self.server = client  # until it is known
        self.is_gone = False
        self.is_ready = False
        self.calls: list[_Call | _Streaming] = []
        self._endpoint: _Endpoint | None = None
        self._address = address
        self._number = number
        self._latest_s = {True: 0.0, False: 0.0}
        self._waiting: list[Callable[[], None]] = []
        self._give_up_s = network.loop.time() + CONNECT_TIMEOUT_S
        network.loop.at(network.loop.time() + 0.001, self._try)

    def _try(self) -> None:
        if self.is_gone:
            return
        endpoint = self.network.endpoint(self._address, self._number)
        if endpoint is None:
            self.give_up()
            return
        now_s = self.network.loop.time()
        there = self.network.link(self.client.name, endpoint.process.name)
        back = self.network.link(endpoint.process.name, self.client.name)
        if endpoint.process.is_frozen or now_s < max(there.cut_until_s, back.cut_until_s):
            if now_s >= self._give_up_s:
                self.give_up()
            else:
                self.network.loop.at(now_s + _CONNECT_RETRY_S, self._try)
            return
        self.server, self._endpoint, self.is_ready = endpoint.process, endpoint, True
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def when_ready(self, work: Callable[[], None]) -> None:
        if self.is_ready:
            work()
        else:
            self._waiting.append(work)

    def handler(self, method: str) -> Any:
        return self._endpoint.handler(method) if self._endpoint is not None else None

    @property
    def accept(self) -> Accept | None:
        return self._endpoint.accept if self._endpoint is not None else None

    def send(self, to_server: bool, deliver: Callable[[], None], *, copy: Callable[[], None] | None = None) -> None:
        """Delivers after all that was sent before; `copy` once more, perhaps."""
        loop = self.network.loop
        names = (self.client.name, self.server.name)
        link = self.network.link(*(names if to_server else names[::-1]))
        now_s = loop.time()
        arrival_s = max(now_s, link.cut_until_s) + link.delay_s(now_s)
        # Timers of one moment have no order.
        self._latest_s[to_server] = arrival_s = max(arrival_s, self._latest_s[to_server] + _TICK_S)
        loop.at(arrival_s, lambda: None if self.is_gone else deliver())
        if copy is not None and link.repeats(now_s):
            # Some come in the midst of what followed, others when the session's next epoch has begun.
            again_s = arrival_s + link.stream.uniform(0.0, link.stream.choice((0.3, 3.0)))
            loop.at(again_s, lambda: None if self.is_gone else copy())

    def give_up(self) -> None:
        """Both ends find it broken now; a frozen one when it wakes up."""
        if self.is_gone:
            return
        self.is_gone = True
        self.network.forget(self)
        for call in list(self.calls):
            call.lost_by_client()
            call.lost_by_server()

    def hang_up(self, process: Process) -> None:
        """One end is gone; the other learns it after all that came before."""
        other_is_server = process is self.client
        if not self.is_ready:
            self.give_up()
            return

        def learn() -> None:
            self.give_up()

        self.send(other_is_server, learn)


class _Streaming:
    """A stream of the data plane: both ends."""

    def __init__(self, connection: _Connection, accept: Accept) -> None:
        self._connection = connection
        self.client = _StreamEnd(self, connection.client, accept)
        self._server: _StreamEnd | None = None
        connection.calls.append(self)
        connection.when_ready(lambda: connection.send(True, self._arrive))

    def transmit(self, sender: "_StreamEnd", message: bytes, *, may_repeat: bool) -> None:
        """Brings bytes to the other end."""
        connection, to_server = self._connection, sender is self.client

        def deliver(is_copy: bool) -> None:
            other = self._other(sender)
            if other is not None:
                arrived = connection.network.tamper(sender.process, other.process, message, is_copy)
                if arrived or not is_copy:
                    other.process.when_running(lambda: other.receive(arrived))

        def send() -> None:
            connection.send(to_server, lambda: deliver(False), copy=(lambda: deliver(True)) if may_repeat else None)

        connection.when_ready(send)

    def say_end(self, sender: "_StreamEnd", end: StreamEnd) -> None:
        """The other end learns, after all that came before, that this one stopped."""

        def arrive() -> None:
            other = self._other(sender)
            if other is not None:
                other.process.when_running(lambda: other.finish(end))

        self._connection.when_ready(lambda: self._connection.send(sender is self.client, arrive))

    def settle(self) -> None:
        """When both ends are done, neither is notified of a broken connection."""
        is_over = self.client.ended.done() and (self._server is None or self._server.ended.done())
        if is_over and self in self._connection.calls:
            self._connection.calls.remove(self)

    def lost_by_client(self) -> None:
        self.client.process.when_running(lambda: self.client.finish(StreamEnd(StreamCause.LOST)))

    def lost_by_server(self) -> None:
        server = self._server
        if server is not None:
            server.process.when_running(lambda: server.finish(StreamEnd(StreamCause.LOST)))

    def _arrive(self) -> None:
        accept, process = self._connection.accept, self._connection.server
        if accept is None:
            self._connection.give_up()
            return
        self._server = _StreamEnd(self, process, accept)

    def _other(self, end: "_StreamEnd") -> "_StreamEnd | None":
        return self._server if end is self.client else self.client


class _StreamEnd:
    """One end of a stream, as the services use it."""

    def __init__(self, streaming: _Streaming, process: Process, accept: Accept) -> None:
        self.process = process
        self.peer: Workload | None = None
        self.heard_s = 0.0
        self.num_waiting_bytes = 0
        self.ended: asyncio.Future[StreamEnd] = asyncio.get_running_loop().create_future()
        self._streaming = streaming
        self._accept: Accept | None = accept
        self._receive: Receiver | None = None
        self._num_sent = 0

    def send(self, control: Message, payload: Buffer = b"") -> None:
        if not self.ended.done():
            self._num_sent += 1
            # Greetings do not come twice.
            self._streaming.transmit(self, join([encode(control, payload)]), may_repeat=self._num_sent > 1)

    def close(self) -> None:
        self._stop(StreamEnd(StreamCause.CLOSED))

    def fail(self, error: CorollaError) -> None:
        self._stop(StreamEnd(StreamCause.FAILED, error))

    def abort(self, cause: StreamCause = StreamCause.LOST) -> None:
        if not self.ended.done():
            self.finish(StreamEnd(cause))
            self._streaming.say_end(self, StreamEnd(StreamCause.LOST))

    def receive(self, message: bytes) -> None:
        """Bytes have come in."""
        if not self.ended.done():
            self.process.call(lambda: self._take(message))

    def finish(self, end: StreamEnd) -> None:
        if not self.ended.done():
            self.ended.set_result(end)
            self._streaming.settle()

    def _take(self, message: bytes) -> None:
        self.heard_s = asyncio.get_running_loop().time()
        if self._accept is not None:
            self._receive, self._accept = self._accept(self), None
        try:
            for frame in decode(message):
                if self._receive is None or self.ended.done() or isinstance(frame.control, pb.Pong):
                    continue
                if isinstance(frame.control, pb.Ping):
                    self.send(pb.Pong())
                else:
                    self._receive(frame)
        except CorollaError as error:
            self.fail(error)
        except Exception:
            self.fail(InternalError("an internal error ended the stream"))

    def _stop(self, end: StreamEnd) -> None:
        if not self.ended.done():
            self.finish(end)
            self._streaming.say_end(self, end)


class _Call:
    """One call, of both ends."""

    def __init__(self, connection: _Connection, method: str, parse: Callable[[bytes], Any] | None) -> None:
        self._connection = connection
        self._loop = connection.network.loop
        self._method = method
        self._parse = parse or (lambda data: data)
        self._received: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None
        self._end: aio.AioRpcError | bool | None = False
        self._task: asyncio.Task[None] | None = None
        self._status: tuple[grpc.StatusCode, str, Any] = (grpc.StatusCode.OK, "", ())
        self._is_handled = False
        connection.calls.append(self)

    # --- the caller's end ---

    def begin(self, request: bytes | None, timeout_s: float | None) -> None:
        if timeout_s is not None:
            self._loop.at(self._loop.time() + timeout_s, self._run_out)
        if self._connection.is_gone:
            self._finish(_rpc_error(grpc.StatusCode.UNAVAILABLE, "lost"))
            return
        self._connection.when_ready(lambda: self._connection.send(True, lambda: self._serve(request)))

    def __aiter__(self) -> "_Call":
        return self

    async def __anext__(self) -> Any:
        while not self._received:
            if self._end is not False:
                if self._end is None:
                    raise StopAsyncIteration
                raise cast(aio.AioRpcError, self._end)
            self._news = self._loop.create_future()
            try:
                await self._news
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._parse(self._received.popleft())

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()

    def cancel(self) -> None:
        if self._end is False:
            self._finish(_rpc_error(grpc.StatusCode.CANCELLED, "cancelled"))
            if self._connection.is_ready and not self._connection.is_gone:
                self._connection.send(True, self._cancel_handler)

    def lost_by_client(self) -> None:
        self._connection.client.when_running(
            lambda: self._finish(_rpc_error(grpc.StatusCode.UNAVAILABLE, "connection lost"))
        )

    def _run_out(self) -> None:
        if self._end is False:
            self._connection.client.when_running(self._expire)

    def _expire(self) -> None:
        if self._end is False:
            self._finish(_rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            if self._connection.is_ready and not self._connection.is_gone:
                self._connection.send(True, self._cancel_handler)

    def _receive(self, message: bytes) -> None:
        if self._end is False:
            self._received.append(message)
            self._tell()

    def _finish(self, end: aio.AioRpcError | None) -> None:
        if self._end is False:
            self._end = end
            self._tell()
            self._settle()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # --- the handler's end ---

    @property
    def caller(self) -> str:
        return self._connection.client.name

    def lost_by_server(self) -> None:
        process = self._connection.server
        if process.is_frozen:
            # It first reads what is in its buffers.
            process.when_running(self._cancel_handler_soon)
        else:
            self._cancel_handler()

    def _serve(self, request: bytes | None) -> None:
        handler = self._connection.handler(self._method)
        if handler is None:
            self._answer_end((grpc.StatusCode.UNIMPLEMENTED, "Method not found!", ()))
            return
        self._task = self._connection.server.start(self._handle(handler, request))

    async def _handle(self, handler: Any, request: bytes | None) -> None:
        serialise = handler.response_serializer or (lambda response: response)
        context = _Context(self, serialise, request)
        try:
            await handler.stream_stream(None, context)
        except aio.AbortError:
            pass
        except Exception:
            self._status = (grpc.StatusCode.UNKNOWN, "Unexpected failure", ())
        finally:
            self._is_handled = True
            self._settle()
        self._answer_end(self._status)

    def _settle(self) -> None:
        """When both ends are done, neither is notified of a broken connection."""
        if self._end is not False and (self._is_handled or self._task is None) and self in self._connection.calls:
            self._connection.calls.remove(self)

    def answer(self, message: bytes) -> None:
        if self._connection.is_gone:
            raise aio.UsageError("RPC already finished.")
        self._connection.send(False, lambda: self._receive(message))

    def abort(self, code: grpc.StatusCode, details: str, metadata: Any) -> None:
        self._status = (code, details, metadata)

    def _answer_end(self, status: tuple[grpc.StatusCode, str, Any]) -> None:
        code, details, metadata = status
        end = None if code is grpc.StatusCode.OK else _rpc_error(code, details, metadata)
        self._connection.send(False, lambda: self._connection.client.when_running(lambda: self._finish(end)))

    def _cancel_handler_soon(self) -> None:
        self._loop.at(self._loop.time() + _WAKING_S, self._cancel_handler)

    def _cancel_handler(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Context:
    """The context of a handler."""

    def __init__(self, call: _Call, serialise: Callable[[Any], bytes], request: bytes | None) -> None:
        self._call = call
        self._serialise = serialise
        self._request = request

    async def read(self) -> Any:
        request, self._request = self._request, None
        return aio.EOF if request is None else request

    async def write(self, response: Any) -> None:
        self._call.answer(self._serialise(response))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._call.abort(code, details, trailing_metadata)
        raise aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return self._call.caller


class _Channel:
    """A channel of `grpc.aio`, as far as the services use one."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._connection: _Connection | None = None

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_options: Any
    ) -> Callable[..., Awaitable[Any]]:
        def call(request: Any, timeout: float | None = None, metadata: None = None) -> _Call:
            return self._begin(method, request_serializer(request), response_deserializer, timeout)

        return call

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_options: Any
    ) -> Callable[..., _Call]:
        def call(request: Any, timeout: float | None = None) -> _Call:
            return self._begin(method, request_serializer(request), response_deserializer, timeout)

        return call

    async def close(self, _grace_s: float | None = None) -> None:
        if self._connection is not None:
            for call in list(self._connection.calls):
                if isinstance(call, _Call):
                    call.cancel()

    def _begin(self, method: str, request: bytes | None, parse: Any, timeout_s: float | None) -> _Call:
        if self._connection is None or self._connection.is_gone:
            self._connection = self._network.connect(self._process, self._address)
        call = _Call(self._connection, method, parse)
        call.begin(request, timeout_s)
        return call


def _rpc_error(code: grpc.StatusCode, details: str, metadata: Any = ()) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*metadata), details)
