"""Streams go on over other connections when certificates change: no frame is lost, and none overtakes another."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from corolla.block_server.peers import Peer, PeerTable
from corolla.chassis.errors import MalformedMessage, QueueFull, RoleDenied
from corolla.trust.authority import Authority
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Frame
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream, StreamCause, StreamLimits, StreamListener
from tests.identities import Identities
from tests.integration.waiting import until

SERVER, CLIENT = (Role.BLOCK, "1"), (Role.CLIENT, "2")
LIMITS: Final = StreamLimits(silence_s=4.0, ping_after_s=2.0, max_waiting_bytes=128 << 20)
"""Ends look twice a second whether they have another certificate."""
HANGS_S: Final = 30.0


class Server:
    """Gives each step back as a block server does, or does with connections as the test says.

    Attributes:
        connections: that were taken, the oldest first.
        frames: what came on each, but for the steps that were given back.
        numbers: of those.
        is_scripted: the test says what is sent.
        welcome: the answer to Hello.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.connections: list[Stream] = []
        self.frames: list[asyncio.Queue[Frame]] = []
        self.numbers: list[int] = []
        self.is_scripted = False
        self.welcome = pb.Welcome(server_id="s", takes_stream_ids=True)
        self._peers = PeerTable()

    def accept(self, stream: Stream) -> Receiver:
        frames = asyncio.Queue[Frame]()
        self.connections.append(stream)
        self.frames.append(frames)
        peer: Peer | None = None

        def receive(frame: Frame) -> None:
            nonlocal peer
            control = frame.control
            if isinstance(control, pb.Hello):
                peer = self._peers.named(control.stream_id)
                if peer is not None:
                    peer.expect(stream)
                else:
                    peer = Peer(control.client_id, stream, control.stream_id)
                    self._peers.add(peer)
                stream.send(self.welcome)
            elif self.is_scripted or peer is None:
                frames.put_nowait(frame)
            elif isinstance(control, pb.GoAway):
                peer.go_over()
            elif isinstance(control, pb.Step):
                self.numbers.append(control.step_id)
                peer.send(control, frame.payload)

        return receive

    @property
    def num_standing(self) -> int:
        return sum(not each.ended.done() for each in self.connections)


class Pair:
    """A server, a client, and a stream between them, on which the client has sent steps."""

    def __init__(self, folder: Path) -> None:
        self.identities = Identities(folder)
        self.server = Server(Network.from_folder(self.identities.folder_of(*SERVER)))
        self.client = Network.from_folder(self.identities.folder_of(*CLIENT))
        self.stream: Stream
        self.numbers: list[int] = []
        self.num_sent = 0

    def send(self, payload: bytes = b"") -> None:
        self.num_sent += 1
        self.stream.send(pb.Step(step_id=self.num_sent), payload)

    async def until_answered(self) -> None:
        """Until all has come, once and in order, both ways."""
        await until(lambda: len(self.numbers) >= self.num_sent)
        assert self.server.numbers == self.numbers == list(range(1, self.num_sent + 1))
        assert not self.stream.ended.done()

    async def until_connected(self, num_connections: int, num_standing: int = 1) -> None:
        await until(
            lambda: len(self.server.connections) >= num_connections and self.server.num_standing == num_standing
        )

    def take_changes(self) -> None:
        for network in (self.server.network, self.client):
            assert network.credentials is not None
            network.credentials.files.refresh()

    def replace(self, *workloads: tuple[Role, str], signer: Authority | None = None) -> None:
        """Both processes take other certificates of these."""
        for role, name in workloads:
            self.identities.replace_one(role, name, signer)
        self.take_changes()


@asynccontextmanager
async def paired(folder: Path, limits: StreamLimits = LIMITS) -> AsyncIterator[Pair]:
    pair, listener = Pair(folder), StreamListener("127.0.0.1", 0)
    await listener.start(pair.server.accept, LIMITS, trust=pair.server.network.callers)

    def accept(stream: Stream) -> Receiver:
        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Step):
                pair.numbers.append(frame.control.step_id)

        return receive

    pair.stream = pair.client.connect(f"127.0.0.1:{listener.port}", accept, limits)
    pair.stream.send(pb.Hello(client_id=bytes(16)))
    pair.send()
    await pair.until_answered()
    try:
        yield pair
    finally:
        pair.stream.close()
        await listener.close()


async def test_a_stream_goes_on_while_leaves_and_authority_are_replaced(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:

        async def talk() -> None:
            while True:
                pair.send(bytes(100_000))
                await asyncio.sleep(0.001)

        talking = asyncio.create_task(talk())
        for num_connections in (2, 3):
            old, new = pair.identities.authority, Authority()
            pair.identities.trust(old, new)
            pair.take_changes()
            pair.identities.replace(new)
            pair.take_changes()
            await pair.until_connected(num_connections)
            pair.identities.trust(new)
            pair.take_changes()
        talking.cancel()
        await pair.until_answered()


@pytest.mark.parametrize("changed", [SERVER, CLIENT])
async def test_a_stream_outlives_the_certificate_of_either_end(tmp_path: Path, changed: tuple[Role, str]) -> None:
    """Much is on its way over the old connection when the new one comes about."""
    async with paired(tmp_path) as pair:
        for _ in range(4):
            pair.send(bytes(16 << 20))
        old = pair.identities.certificate_of(*changed)
        pair.replace(changed)
        for _ in range(100):
            pair.send(b"little")
            await asyncio.sleep(0.01)
        await pair.until_connected(2)
        pair.identities.revoke_certificates(old)
        pair.take_changes()
        await asyncio.sleep(2 * LIMITS.silence_s / 8)
        pair.send()
        await pair.until_answered()
        assert len(pair.server.connections) == 2


async def test_where_no_other_connection_comes_about_the_stream_stays(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        pair.replace(CLIENT, signer=Authority())
        await asyncio.sleep(LIMITS.silence_s / 2)
        pair.send()
        await pair.until_answered()
        assert len(pair.server.connections) == 1
        pair.replace(CLIENT)
        await pair.until_connected(2)
        pair.send()
        await pair.until_answered()


# --- servers that do as they like -------------------------------------------------------------------------------------


async def asked_to_go(pair: Pair) -> None:
    """The server is scripted from now on, and has heard the caller's last on the old connection."""
    pair.server.is_scripted = True
    pair.server.connections[0].send(pb.GoAway())
    last = await asyncio.wait_for(pair.server.frames[0].get(), HANGS_S)
    assert last.control == pb.GoAway(is_last=True)


async def test_both_ways_wait_for_the_old_connection_to_bring_all(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        await asked_to_go(pair)
        old, new = pair.server.connections
        new.send(pb.Step(step_id=3))
        step = pb.Step(step_id=7)
        pair.stream.send(step, b"payload")
        step.step_id = 8
        await asyncio.sleep(0.3)
        old.send(pb.Step(step_id=2))
        old.send(pb.GoAway(is_last=True))
        frame = await asyncio.wait_for(pair.server.frames[1].get(), HANGS_S)
        assert (frame.control, bytes(frame.payload)) == (pb.Step(step_id=7), b"payload")
        new.send(pb.Step(step_id=4))
        await until(lambda: len(pair.numbers) >= 4)
        assert pair.numbers == [1, 2, 3, 4]
        assert (await asyncio.wait_for(old.ended, HANGS_S)).cause is StreamCause.CLOSED


@pytest.mark.parametrize("number", [0, 1], ids=["old", "new"])
async def test_while_it_goes_over_a_stream_ends_with_either_connection(tmp_path: Path, number: int) -> None:
    async with paired(tmp_path) as pair:
        await asked_to_go(pair)
        pair.server.connections[number].fail(QueueFull("too much"))
        assert isinstance((await asyncio.wait_for(pair.stream.ended, HANGS_S)).error, QueueFull)
        await pair.until_connected(2, num_standing=0)


async def test_only_so_much_waits(tmp_path: Path) -> None:
    limits = StreamLimits(max_waiting_bytes=1 << 20)
    async with paired(tmp_path, limits) as pair:
        await asked_to_go(pair)
        pair.stream.send(pb.Step(), bytes(1 << 19))
        with pytest.raises(QueueFull):
            pair.stream.send(pb.Step(), bytes(1 << 19))
    async with paired(tmp_path, limits) as pair:
        await asked_to_go(pair)
        for _ in range(5000):
            pair.server.connections[1].send(pb.Step())
        end = await asyncio.wait_for(pair.stream.ended, HANGS_S)
        assert isinstance(end.error, QueueFull)


async def test_a_server_does_not_fill_its_callers_with_connections(tmp_path: Path) -> None:
    """It asks for another one again and again, and lets none bring anything."""
    async with paired(tmp_path) as pair:
        began_s = time.monotonic()
        pair.server.welcome = pb.Welcome(server_id="another")
        for _ in range(250):
            pair.server.connections[0].send(pb.GoAway())
            await asyncio.sleep(0.01)
        await pair.until_connected(3)
        assert len(pair.server.connections) <= 2 + (time.monotonic() - began_s) / 2
        # The caller does not go on at another server, whose address it is by now.
        assert isinstance((await pair.server.connections[-1].ended).error, RoleDenied)
        pair.send()
        await pair.until_answered()


async def test_a_server_leaves_only_once_its_caller_has(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        pair.server.connections[0].send(pb.GoAway(is_last=True))
        assert isinstance((await asyncio.wait_for(pair.stream.ended, HANGS_S)).error, MalformedMessage)


async def test_a_server_that_knows_no_stream_ids_is_not_asked(tmp_path: Path) -> None:
    """One of an earlier version: its caller stays where it is."""
    async with paired(tmp_path) as pair:
        pair.server.connections[0].send(pb.Welcome(server_id="s"))
        pair.replace(SERVER, CLIENT)
        await asyncio.sleep(LIMITS.silence_s / 2)
        pair.send()
        await pair.until_answered()
        assert len(pair.server.connections) == 1
