"""Connections of the data plane over real sockets, against their like and against ends that misbehave."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from corolla.chassis.channels import bind, new_server
from corolla.chassis.errors import FingerprintMismatch, MalformedMessage, QueueFull, RoleDenied, StartupError
from corolla.chassis.metrics import MetricsEndpoint
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire import stream
from corolla.wire.frames import Frame, encode
from corolla.wire.network import Network
from corolla.wire.stream import (
    TRANSITIONS,
    FrameStream,
    Receiver,
    Stream,
    StreamCause,
    StreamLimits,
    StreamListener,
    StreamState,
    StreamTrust,
    connect,
)
from tests.frame_bytes import join
from tests.identities import Identities

LIMITS = StreamLimits()
# A machine may pause; a peer that answers must not be taken for silent.
QUICK = StreamLimits(ping_after_s=0.1, silence_s=1.0, greeting_s=0.5, flush_s=0.5)
GREETING = b"CRLL\x02\x00\x00\x00"


class Acceptor:
    """Takes streams, and gives each frame back unless the test says otherwise."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.on_frame: Callable[[Frame, Stream], None] = lambda frame, stream: stream.send(*frame)
        self.address = ""

    def accept(self, stream: Stream) -> Callable[[Frame], None]:
        self.streams.put_nowait(stream)

        def receive(frame: Frame) -> None:
            self.frames.append(frame)
            self.on_frame(frame, stream)

        return receive


@asynccontextmanager
async def accepting(limits: StreamLimits = LIMITS, trust: StreamTrust | None = None) -> AsyncIterator[Acceptor]:
    acceptor = Acceptor()
    listener = StreamListener("127.0.0.1", 0)
    await listener.start(acceptor.accept, limits, trust=trust)
    acceptor.address = f"127.0.0.1:{listener.port}"
    try:
        yield acceptor
    finally:
        await listener.close()


class Caller:
    """The frames that came back."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def connect(
        self, address: str, limits: StreamLimits = LIMITS, trust: StreamTrust | None = None
    ) -> FrameStream:
        """Returns when the stream is open, or has ended."""
        is_open = asyncio.Event()

        def accept(stream: Stream) -> Receiver:
            is_open.set()
            return self.frames.put_nowait

        stream = connect(address, accept, limits, trust=trust)
        stream.ended.add_done_callback(lambda _: is_open.set())
        await is_open.wait()
        return stream


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose bytes the test writes."""
    host, _, port = address.partition(":")
    return await asyncio.open_connection(host, int(port))


def step(number: int) -> pb.Step:
    return pb.Step(step_id=number)


# --- frames -----------------------------------------------------------------------------------------------------------


async def test_frames_come_whole_and_in_order() -> None:
    payloads = [b"", b"x", bytes(range(256)) * 40, b"y" * (5 << 20), b""]
    async with accepting() as acceptor:
        caller = Caller()
        stream = await caller.connect(acceptor.address)
        for number, payload in enumerate(payloads):
            stream.send(step(number), payload)
        for number, payload in enumerate(payloads):
            frame = await caller.frames.get()
            assert (frame.control, bytes(frame.payload)) == (step(number), payload)
        stream.close()
        assert (await stream.ended).cause is StreamCause.CLOSED
        assert (await (await acceptor.streams.get()).ended).cause is StreamCause.CLOSED


async def test_bytes_may_come_one_by_one() -> None:
    async with accepting() as acceptor:
        reader, writer = await raw(acceptor.address)
        sent = GREETING + join([encode(step(1), b"abc"), encode(step(2))])
        for index in range(len(sent)):
            writer.write(sent[index : index + 1])
            await writer.drain()
        expected = GREETING + join([encode(step(1), b"abc"), encode(step(2))])
        assert await reader.readexactly(len(expected)) == expected
        writer.close()


async def test_what_was_sent_last_arrives_before_the_stream_closes() -> None:
    async with accepting() as acceptor:
        acceptor.on_frame = lambda frame, stream: None
        stream = await Caller().connect(acceptor.address)
        stream.send(step(7), b"z" * (8 << 20))
        stream.close()
        stream.send(step(8))
        assert (await (await acceptor.streams.get()).ended).cause is StreamCause.CLOSED
        assert [frame.control for frame in acceptor.frames] == [step(7)]


def networks(identities: Identities, *workloads: tuple[Role, str]) -> list[Network]:
    return [Network.from_folder(identities.folder_of(*workload)) for workload in workloads]


async def test_streams_run_over_tls(tmp_path: Path) -> None:
    block, client = networks(Identities(tmp_path), (Role.BLOCK, "1"), (Role.CLIENT, "2"))
    async with accepting(trust=block.callers) as acceptor:
        caller = Caller()
        stream = await caller.connect(acceptor.address, trust=client.servers)
        assert (str(stream.peer), str((await acceptor.streams.get()).peer)) == (
            "spiffe://test/block/1", "spiffe://test/client/2",
        )  # fmt: skip
        stream.send(step(1), b"secret" * 1_000_000)
        assert bytes((await caller.frames.get()).payload) == b"secret" * 1_000_000
        stream.close()
        assert (await stream.ended).cause is StreamCause.CLOSED
        assert (await (await Caller().connect(acceptor.address, QUICK)).ended).cause is StreamCause.LOST


@pytest.mark.parametrize("is_secure", [False, True])
async def test_large_frames_that_wait_keep_their_place(tmp_path: Path, is_secure: bool) -> None:
    """The transport takes pieces as it writes them; small frames and the end come behind."""
    block, client = networks(Identities(tmp_path), (Role.BLOCK, "1"), (Role.CLIENT, "2"))
    async with accepting(trust=block.callers if is_secure else None) as acceptor:
        caller = Caller()
        stream = await caller.connect(acceptor.address, trust=client.servers if is_secure else None)
        other = await acceptor.streams.get()
        sent = [(step(number), bytes([number]) * size) for number, size in enumerate((3 << 20, 5, 2 << 20, 0, 1 << 18))]
        for control, payload in sent:
            other.send(control, payload)
        for control, payload in sent:
            frame = await caller.frames.get()
            assert (frame.control, bytes(frame.payload)) == (control, payload)
        for control, payload in sent:
            other.send(control, payload)
        other.close()
        for control, payload in sent:
            frame = await caller.frames.get()
            assert (frame.control, bytes(frame.payload)) == (control, payload)
        assert (await stream.ended).cause is StreamCause.CLOSED


async def test_a_certificate_of_another_authority_gets_no_connection(tmp_path: Path) -> None:
    (block,) = networks(Identities(tmp_path / "own"), (Role.BLOCK, "1"))
    (client,) = networks(Identities(tmp_path / "foreign"), (Role.CLIENT, "2"))
    async with accepting(trust=block.callers) as acceptor:
        assert (await (await Caller().connect(acceptor.address, trust=client.servers)).ended).error is None
        assert acceptor.streams.empty()


@pytest.mark.parametrize("role", [Role.ROUTER, Role.OPERATOR])
async def test_another_role_ends_the_stream(tmp_path: Path, role: Role) -> None:
    block, other = networks(Identities(tmp_path), (Role.BLOCK, "1"), (role, "2"))
    async with accepting(trust=block.callers) as acceptor:
        end = await (await Caller().connect(acceptor.address, trust=other.servers)).ended
        assert isinstance(end.error, RoleDenied)
        assert acceptor.streams.empty()


async def test_who_answers_and_is_no_block_server_learns_nothing(tmp_path: Path) -> None:
    """A process that took the address of a block server answers here."""
    impostor, client = networks(Identities(tmp_path), (Role.CLIENT, "1"), (Role.CLIENT, "2"))
    async with accepting(trust=impostor.callers) as acceptor:
        stream = connect(acceptor.address, lambda _: lambda _: None, LIMITS, trust=client.servers)
        stream.send(step(1), b"secret")
        assert isinstance((await stream.ended).error, RoleDenied)
        await asyncio.sleep(0.05)
        assert acceptor.frames == []


async def test_connections_that_begin_after_a_renewal_use_the_new_certificates(tmp_path: Path) -> None:
    """The new authority counts, too: the old one is no longer trusted."""
    old, new = Identities(tmp_path / "old"), Identities(tmp_path / "new")
    block, client = networks(old, (Role.BLOCK, "1"), (Role.CLIENT, "2"))
    async with accepting(trust=block.callers) as acceptor:
        await Caller().connect(acceptor.address, trust=client.servers)
        for network, role, name in ((block, Role.BLOCK, "1"), (client, Role.CLIENT, "2")):
            new.authority.issue(old.folder_of(role, name), Workload("test", role, name), ["127.0.0.1"])
            assert network.credentials is not None
            network.credentials.files.refresh()
        after = await Caller().connect(acceptor.address, trust=client.servers)
        assert not after.ended.done()
        (outdated,) = networks(Identities(tmp_path / "3", old.authority), (Role.CLIENT, "3"))
        assert (await (await Caller().connect(acceptor.address, trust=outdated.servers)).ended).error is None


# --- ends that misbehave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_connection_may_have_the_descriptor_of_a_port_that_was_just_released(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def release_and_connect() -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as lowest:
            number = lowest.fileno()
        released = StreamListener("127.0.0.1", 0)
        await released.start(lambda _: lambda _: None)
        await asyncio.sleep(0.01)  # it waits for a connection
        released.release()
        released.release()  # as at the end of a server that has drained
        reader, writer = socket.socketpair()
        with reader, writer:
            assert reader.fileno() == number
            can_be_read = asyncio.Event()
            loop.add_reader(reader, can_be_read.set)
            writer.sendall(b"x")
            async with asyncio.timeout(30):
                await can_be_read.wait()
            loop.remove_reader(reader)
        await released.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(release_and_connect())


async def test_where_nobody_listens_a_stream_is_lost() -> None:
    """The port is taken, and its owner is not ready yet."""
    listener = StreamListener("127.0.0.1", 0)
    stream = await Caller().connect(f"127.0.0.1:{listener.port}")
    assert (await stream.ended).cause is StreamCause.LOST
    listener.release()


async def test_a_taken_port_says_so() -> None:
    async with accepting() as acceptor:
        with pytest.raises(StartupError, match=f"cannot listen on {acceptor.address}"):
            StreamListener("127.0.0.1", int(acceptor.address.split(":")[1]))
    two = [StreamListener("127.0.0.1", 0)]
    two.append(StreamListener("127.0.0.1", two[0].port))  # which the system allows as long as neither listens
    await two[0].start(acceptor.accept)
    with pytest.raises(StartupError, match=f"cannot listen on port {two[0].port}"):
        await two[1].start(acceptor.accept)
    for each in two:
        await each.close()


@pytest.mark.parametrize("held, asked", [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")])
async def test_a_port_of_all_addresses_is_not_shared_with_one_of_them(held: str, asked: str) -> None:
    """Callers of the one address would silently reach the other process."""
    with socket.socket() as other:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.bind((held, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"cannot listen on {asked}:{port}"):
            StreamListener(asked, port)
        with pytest.raises(StartupError, match=f"cannot listen on {asked}:{port}"):
            bind(new_server(), asked, port)
        with pytest.raises(StartupError, match=f"cannot serve metrics on {asked}:{port}"):
            MetricsEndpoint(CollectorRegistry(), asked, port, lambda: True)


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_stream_above_the_limit_is_refused_at_once_and_disturbs_no_other(
    is_encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends that never greet or shake hands count, and lose their places by a deadline."""
    monkeypatch.setattr(stream, "most_connections_of_a_port", lambda: 3)
    servers = callers = None
    if is_encrypted:
        block, client = networks(Identities(tmp_path), (Role.BLOCK, "1"), (Role.CLIENT, "2"))
        servers, callers = client.servers, block.callers
    async with accepting(QUICK, callers) as acceptor:
        caller = Caller()
        first = await caller.connect(acceptor.address, trust=servers)
        idle = [await raw(acceptor.address) for _ in range(4)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in idle]
        done, _ = await asyncio.wait(ended, timeout=QUICK.greeting_s / 2, return_when=asyncio.ALL_COMPLETED)
        assert done == set(ended[2:])
        first.send(step(1))
        assert (await caller.frames.get()).control == step(1)
        await asyncio.wait(ended)
        other = await caller.connect(acceptor.address, trust=servers)
        other.send(step(2))
        assert (await caller.frames.get()).control == step(2)
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]", "localhost", ""])
async def test_hosts_are_those_of_other_services(host: str) -> None:
    acceptor, listener = Acceptor(), StreamListener(host, 0)
    await listener.start(acceptor.accept)
    caller = Caller()
    stream = await caller.connect(f"127.0.0.1:{listener.port}")
    stream.send(step(1))
    assert (await caller.frames.get()).control == step(1)
    await listener.close()
    assert (await stream.ended).cause is StreamCause.CLOSED


async def test_what_is_sent_before_a_stream_is_open_arrives_first() -> None:
    async with accepting() as acceptor:
        caller = Caller()
        stream = connect(acceptor.address, lambda _: caller.frames.put_nowait, LIMITS)
        stream.send(step(1), b"a" * 100_000)
        stream.send(step(2))
        for number in (1, 2):
            assert (await caller.frames.get()).control == step(number)
        stream.send(step(3))
        assert (await caller.frames.get()).control == step(3)
        stream.close()
        with pytest.raises(QueueFull):
            connect(acceptor.address, lambda _: print, StreamLimits(max_waiting_bytes=100)).send(step(1), bytes(200))


@pytest.mark.parametrize(
    "stop, cause",
    [
        (lambda stream: stream.close(), StreamCause.CLOSED),
        (lambda stream: stream.abort(), StreamCause.LOST),
        (lambda stream: stream.fail(MalformedMessage("frame", "bad")), StreamCause.FAILED),
    ],
    ids=["close", "abort", "fail"],
)
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
async def test_a_stream_may_be_stopped_while_it_connects(
    stop: Callable[[Stream], None], cause: StreamCause, num_turns: int
) -> None:
    async with accepting() as acceptor:
        stream = connect(acceptor.address, lambda _: lambda _: None, LIMITS)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        stop(stream)
        async with asyncio.timeout(30):
            assert (await stream.ended).cause is cause
        while not acceptor.streams.empty():
            await acceptor.streams.get_nowait().ended


@pytest.mark.parametrize("address", ["nobody", "127.0.0.1:0x", "127.0.0.1:99999", "a..b:1", "x" * 64 + ":1", "\0:1"])
async def test_a_stream_to_no_address_is_lost(address: str) -> None:
    stream = connect(address, lambda _: lambda _: None, LIMITS)
    async with asyncio.timeout(30):
        assert (await stream.ended).cause is StreamCause.LOST


async def test_what_was_sent_arrives_though_the_stream_is_closed_before_it_is_open() -> None:
    async with accepting() as acceptor:
        acceptor.on_frame = lambda frame, stream: None
        stream = connect(acceptor.address, lambda _: lambda _: None, LIMITS)
        stream.send(step(1), b"a" * 100_000)
        stream.close()
        stream.send(step(2))
        assert (await stream.ended).cause is StreamCause.CLOSED
        assert (await (await acceptor.streams.get()).ended).cause is StreamCause.CLOSED
        assert [frame.control for frame in acceptor.frames] == [step(1)]


async def test_an_end_that_is_slow_to_take_what_waits_for_it_is_not_silent() -> None:
    """It hears the question whether it lives only after all that was written before."""
    with socket.create_server(("127.0.0.1", 0)) as slow:
        # Small, so that its machine takes on in small parts; those of the other end's buffer are larger than what
        # is read within the time for silence.
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        limits = StreamLimits(ping_after_s=0.5, silence_s=2.0)
        stream = connect(f"127.0.0.1:{slow.getsockname()[1]}", lambda _: lambda _: None, limits)
        taken, _ = await loop.sock_accept(slow)
        await loop.sock_sendall(taken, GREETING)
        stream.send(step(1), bytes(48 << 20))
        for _ in range(40):
            await asyncio.sleep(0.1)
            await loop.sock_recv(taken, 32 << 10)
        assert not stream.ended.done()
        async with asyncio.timeout(30):
            assert (await stream.ended).cause is StreamCause.SILENT
        taken.close()


async def test_who_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        stream = connect(address, lambda stream: lambda frame: None, StreamLimits(connect_s=0.2))
        async with asyncio.timeout(30):
            assert (await stream.ended).cause is StreamCause.LOST


async def test_another_version_is_refused_with_a_sentence_at_either_end() -> None:
    async def speak_version_7(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"CRLL\x07\x00\x00\x00")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak_version_7, "127.0.0.1", 0)
    async with server:
        stream = await Caller().connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        error = (await stream.ended).error
        assert isinstance(error, FingerprintMismatch)
        assert "version 7 of the data plane, and this process version 2" in error.message
    async with accepting() as acceptor:
        reader, writer = await raw(acceptor.address)
        writer.write(b"CRLL\x07\x00\x00\x00")
        assert await reader.read() == GREETING
        assert acceptor.streams.empty()
        writer.close()


@pytest.mark.parametrize("spoken", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01"])
async def test_another_protocol_is_refused(spoken: bytes) -> None:
    async with accepting() as acceptor:
        reader, writer = await raw(acceptor.address)
        writer.write(spoken)
        assert await reader.read() == GREETING
        assert acceptor.streams.empty()
        writer.close()


async def test_who_never_greets_is_cut_off() -> None:
    async with accepting(QUICK) as acceptor:
        reader, writer = await raw(acceptor.address)
        writer.write(GREETING[:5])
        assert await reader.read() == GREETING
        writer.close()


@pytest.mark.parametrize(
    "spoken, said",
    [
        (b"\x00" * 12, "not a frame of this protocol version"),
        (join([encode(step(1))])[:8] + b"\xff\xff\xff\x7f", "larger than"),
        (b"\xc0\x01\x05\x00\x01\x00\x00\x00\x00\x00\x00\x00\xff", "the control part cannot be read as Step"),
    ],
)
async def test_what_is_no_frame_is_refused_and_the_other_end_learns_why(spoken: bytes, said: str) -> None:
    async with accepting() as acceptor:
        reader, writer = await raw(acceptor.address)
        writer.write(GREETING + spoken)
        end = await (await acceptor.streams.get()).ended
        assert end.cause is StreamCause.FAILED
        assert isinstance(end.error, MalformedMessage)
        assert said.encode() in await reader.read()
        writer.close()


async def test_the_other_end_learns_what_a_receiver_raised() -> None:
    async with accepting() as acceptor:

        def refuse(frame: Frame, stream: Stream) -> None:
            raise FingerprintMismatch("other weights") if frame.control == step(1) else ValueError("a bug")

        acceptor.on_frame = refuse
        for number, reason in ((1, FingerprintMismatch.reason), (2, "INTERNAL")):
            stream = await Caller().connect(acceptor.address)
            stream.send(step(number))
            end = await stream.ended
            assert end.cause is StreamCause.FAILED
            assert end.error is not None
            assert end.error.reason == reason
            assert "bug" not in end.error.message


async def test_a_broken_connection_is_lost() -> None:
    async with accepting() as acceptor:
        stream = await Caller().connect(acceptor.address)
        (await acceptor.streams.get()).abort()
        assert (await stream.ended).cause is StreamCause.LOST


async def test_a_silent_end_is_noticed_and_one_that_answers_is_not() -> None:
    async with accepting(QUICK) as acceptor:
        stream = await Caller().connect(acceptor.address, QUICK)
        silent, writer = await raw(acceptor.address)
        writer.write(GREETING)
        living = await acceptor.streams.get()
        assert (await (await acceptor.streams.get()).ended).cause is StreamCause.SILENT
        assert b"\xc0\x01\x10" in await silent.read(), "it was asked first"
        await asyncio.sleep(QUICK.silence_s)
        assert not stream.ended.done()
        assert not living.ended.done()
        writer.close()


async def test_a_process_that_was_held_up_does_not_blame_the_other_end() -> None:
    async with accepting(QUICK) as acceptor:
        stream = await Caller().connect(acceptor.address, QUICK)
        for _ in range(2):
            time.sleep(2 * QUICK.silence_s)  # noqa: ASYNC251 - both ends are held up on purpose
            await asyncio.sleep(QUICK.silence_s / 4)
        assert not stream.ended.done()


async def test_who_does_not_read_is_refused_more_and_cannot_hold_up_a_close() -> None:
    limits = StreamLimits(max_waiting_bytes=1 << 20, flush_s=0.2)
    async with accepting(limits) as acceptor:
        _, writer = await raw(acceptor.address)
        writer.write(GREETING)
        stream = await acceptor.streams.get()

        def send_much() -> None:
            for number in range(1000):
                stream.send(step(number), bytes(256 << 10))

        with pytest.raises(QueueFull):
            send_much()
        stream.close()
        await stream.ended
        writer.close()


# --- states -----------------------------------------------------------------------------------------------------------


def test_every_state_leads_to_the_end() -> None:
    assert set(TRANSITIONS) == set(StreamState)
    assert all(StreamState.ENDED in following for state, following in TRANSITIONS.items() if following)
    assert not TRANSITIONS[StreamState.ENDED]
