"""Streams go on over new connections when certificates change: no frame is lost, and none overtakes another."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from corolla.chassis.errors import CorollaError, MalformedMessage, QueueFull, RoleDenied
from corolla.chassis.private_files import write_private
from corolla.chassis.tasks import TaskGroup
from corolla.trust.authority import Authority
from corolla.trust.credentials import CERTIFICATE_FILE, KEY_FILE
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2 as pb
from corolla.wire import renewal
from corolla.wire.frames import Frame
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream, StreamCause, StreamEnd, StreamLimits, StreamListener, connect
from tests.identities import Identities
from tests.integration.waiting import until

SERVER, CLIENT, OTHER = (Role.BLOCK, "1"), (Role.CLIENT, "2"), (Role.CLIENT, "3")
LIMITS = StreamLimits(silence_s=10.0, ping_after_s=5.0)
RENEWED_S = 2.0
"""A change that a process has taken is usually on all connections by then. What must be there is waited for."""
HANGS_S = 30.0


class End:
    """A process that takes streams or begins them, and renews them.

    Attributes:
        numbers: of the steps that came.
    """

    def __init__(self, identities: Identities, workload: tuple[Role, str]) -> None:
        self.network = Network.of(identities.folder_of(*workload))
        self.numbers: list[int] = []

    def accept(self, stream: Stream) -> Receiver:
        def receive(frame: Frame) -> None:
            assert isinstance(frame.control, pb.Step)
            self.numbers.append(frame.control.step_id)
            if frame.control.samples:
                stream.send(pb.Step(step_id=frame.control.step_id), frame.payload)

        return receive

    def take_changes(self) -> None:
        assert self.network.credentials is not None
        self.network.credentials.files.refresh()


class Pair:
    """A server, a client, and a stream between them.

    Attributes:
        connections: that the server has taken.
    """

    def __init__(self, folder: Path) -> None:
        self.identities = Identities(folder)
        self.server, self.client = End(self.identities, SERVER), End(self.identities, CLIENT)
        self.connections: list[Stream] = []
        self.address = ""
        self.stream: Stream
        self.num_sent = 0

    @property
    def num_connections(self) -> int:
        return len(self.connections)

    async def until_renewed(self, num_connections: int) -> None:
        """Until the server has taken so many connections, and only the newest stands."""

        async def is_renewed() -> bool:
            standing = [each for each in self.connections if not each.ended.done()]
            return self.num_connections >= num_connections and standing == self.connections[-1:]

        await until(is_renewed)

    def send(self, payload: bytes = b"") -> None:
        """One more step, which comes back."""
        self.num_sent += 1
        self.stream.send(pb.Step(step_id=self.num_sent, samples=True), payload)

    async def until_answered(self) -> None:
        """Until all has come, once and in order, both ways."""

        async def is_answered() -> bool:
            return len(self.client.numbers) >= self.num_sent

        await until(is_answered)
        sent = list(range(1, self.num_sent + 1))
        assert self.server.numbers == sent
        assert self.client.numbers == sent

    def replace(self, *workloads: tuple[Role, str], signer: Authority | None = None) -> None:
        """Both processes take new certificates of these."""
        for role, name in workloads:
            self.identities.replace_one(role, name, signer)
        self.take_changes()

    def take_changes(self) -> None:
        self.server.take_changes()
        self.client.take_changes()


@asynccontextmanager
async def paired(folder: Path) -> AsyncIterator[Pair]:
    pair, tasks = Pair(folder), TaskGroup()
    listener = StreamListener("127.0.0.1", 0)
    accept = pair.server.network.accepting(pair.server.accept)

    def accept_counted(stream: Stream) -> Receiver:
        pair.connections.append(stream)
        return accept(stream)

    await listener.start(accept_counted, LIMITS, trust=pair.server.network.callers)
    pair.address = f"127.0.0.1:{listener.port}"
    for end in (pair.server, pair.client):
        end.network.start_renewal(tasks)
    pair.stream = pair.client.network.connect(pair.address, pair.client.accept, LIMITS)
    try:
        yield pair
    finally:
        await tasks.close()
        pair.stream.close()
        await listener.close()


async def test_a_stream_goes_on_while_leaves_and_authority_are_replaced(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        pair.send()
        await pair.until_answered()

        async def talk() -> None:
            while True:
                pair.send(bytes(100_000))
                await asyncio.sleep(0.001)

        talking = asyncio.create_task(talk())
        for _ in range(2):
            old, new = pair.identities.authority, Authority()
            pair.identities.believe(old, new)
            pair.take_changes()
            await asyncio.sleep(RENEWED_S)
            num_before = pair.num_connections
            pair.identities.replace(new)
            pair.take_changes()
            await pair.until_renewed(num_before + 1)
            pair.identities.believe(new)
            pair.take_changes()
        await asyncio.sleep(RENEWED_S)
        talking.cancel()
        await pair.until_answered()
        assert not pair.stream.ended.done()
        assert pair.num_connections >= 3


@pytest.mark.parametrize("changed", [SERVER, CLIENT])
async def test_a_stream_outlives_the_certificate_of_either_end(tmp_path: Path, changed: tuple[Role, str]) -> None:
    async with paired(tmp_path) as pair:
        pair.send()
        await pair.until_answered()
        old = pair.identities.certificate_of(*changed)
        pair.replace(changed)
        await pair.until_renewed(2)
        assert pair.num_connections == 2
        pair.identities.revoke_certificates(old)
        pair.take_changes()
        await asyncio.sleep(RENEWED_S)
        pair.send()
        await pair.until_answered()
        assert not pair.stream.ended.done()


async def test_what_is_on_its_way_arrives_before_what_comes_over_the_new_connection(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        pair.send()
        await pair.until_answered()
        for _ in range(6):
            pair.send(bytes(16 << 20))
        pair.replace(SERVER, CLIENT)
        for _ in range(100):
            pair.send(b"little")
            await asyncio.sleep(0.02)
        await pair.until_answered()
        await pair.until_renewed(2)


async def test_where_no_other_connection_comes_about_the_stream_stays(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        pair.send()
        await pair.until_answered()
        pair.replace(CLIENT, signer=Authority())
        await asyncio.sleep(RENEWED_S)
        pair.send()
        await pair.until_answered()
        assert pair.num_connections == 1
        pair.replace(CLIENT)
        await pair.until_renewed(2)
        pair.send()
        await pair.until_answered()
        assert pair.num_connections == 2


async def test_a_server_does_not_fill_its_callers_with_connections(tmp_path: Path) -> None:
    """It asks for another one again and again, and closes none."""
    identities = Identities(tmp_path)
    server, client = End(identities, SERVER), End(identities, CLIENT)
    taken: list[Stream] = []

    def accept(stream: Stream) -> Receiver:
        taken.append(stream)
        stream.send(pb.Renew(ticket=bytes(16)))

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Renew):
                stream.send(pb.Renew(ticket=bytes(16)))
            elif isinstance(frame.control, pb.Continue) and frame.control.ticket:
                taken[-2].send(pb.Continue())

        return receive

    listener, tasks = StreamListener("127.0.0.1", 0), TaskGroup()
    await listener.start(accept, LIMITS, trust=server.network.callers)
    client.network.start_renewal(tasks)
    began_s = time.monotonic()
    stream = client.network.connect(f"127.0.0.1:{listener.port}", client.accept, LIMITS)

    async def has_few_of_several() -> bool:
        return len(taken) >= 3 and sum(not each.ended.done() for each in taken) <= 3

    await asyncio.sleep(4.5)
    await until(has_few_of_several)
    # The first one, another one at once, and then one a second.
    assert len(taken) <= 2 + time.monotonic() - began_s
    assert not stream.ended.done()
    await tasks.close()
    stream.close()
    await listener.close()


# --- callers that do as they like -------------------------------------------------------------------------------------


class Caller:
    """One connection, on which the test says everything itself."""

    def __init__(self, pair: Pair, workload: tuple[Role, str], limits: StreamLimits = LIMITS) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        trust = End(pair.identities, workload).network.servers
        self.connection = connect(pair.address, lambda _: self.frames.put_nowait, limits, trust=trust)

    async def ticket(self) -> bytes:
        self.connection.send(pb.Renew())
        control = (await self.frames.get()).control
        assert isinstance(control, pb.Renew)
        return control.ticket

    async def end(self) -> StreamEnd:
        async with asyncio.timeout(HANGS_S):
            return await self.connection.ended


async def refusal(pair: Pair, workload: tuple[Role, str], ticket: bytes) -> CorollaError | None:
    """Of one who shows a ticket."""
    caller = Caller(pair, workload)
    caller.connection.send(pb.Continue(ticket=ticket))
    return (await caller.end()).error


async def test_a_ticket_is_for_its_own_caller_and_for_once(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT)
        ticket = await first.ticket()
        assert await first.ticket() == ticket
        assert isinstance(await refusal(pair, OTHER, ticket), RoleDenied)
        assert isinstance(await refusal(pair, CLIENT, bytes(16)), MalformedMessage)
        second.connection.send(pb.Continue(ticket=ticket))
        assert (await first.frames.get()).control == pb.Continue()
        assert isinstance(await refusal(pair, CLIENT, ticket), MalformedMessage)
        # The server writes to the new connection, and reads the old one until its end.
        first.connection.send(pb.Step(step_id=1, samples=True))
        assert (await second.frames.get()).control == pb.Step(step_id=1)
        second.connection.send(pb.Step(step_id=3))
        first.connection.send(pb.Step(step_id=2))
        first.connection.send(pb.Continue())
        assert (await first.end()).cause is StreamCause.CLOSED

        async def has_come() -> bool:
            return pair.server.numbers == [1, 2, 3]

        await until(has_come)
        second.connection.close()


async def test_a_connection_is_not_to_be_renewed_before_it_says_what_it_is_for(tmp_path: Path) -> None:
    """It may be about to continue another stream: an offer would be taken for that one's."""
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT)
        ticket = await first.ticket()
        pair.replace(SERVER)
        await asyncio.sleep(RENEWED_S)
        assert second.frames.empty()
        second.connection.send(pb.Continue(ticket=ticket))
        # Before it says so, the server has offered to renew this one, too.
        async with asyncio.timeout(HANGS_S):
            while (await first.frames.get()).control != pb.Continue():
                pass
        first.connection.send(pb.Continue())
        assert (await first.end()).cause is StreamCause.CLOSED
        offered = (await asyncio.wait_for(second.frames.get(), HANGS_S)).control
        assert isinstance(offered, pb.Renew)
        assert offered.ticket not in (b"", ticket)
        second.connection.close()


async def test_who_says_continue_without_another_connection_is_refused(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        caller = Caller(pair, CLIENT)
        caller.connection.send(pb.Step(step_id=1))
        caller.connection.send(pb.Continue())
        assert isinstance((await caller.end()).error, MalformedMessage)


async def test_a_stream_ends_with_either_of_two_connections_once_the_server_writes_to_the_new_one(
    tmp_path: Path,
) -> None:
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT)
        second.connection.send(pb.Continue(ticket=await first.ticket()))
        await first.frames.get()
        second.connection.abort()
        assert (await first.end()).cause is StreamCause.CLOSED


async def num_taken(stream: Stream) -> int:
    """Steps without payloads, sent until the other end has not read too many of them; 1000 at most."""
    for num_sent in range(1000):
        try:
            stream.send(pb.Step(step_id=num_sent + 1, span_id=bytes(100_000)))
        except QueueFull:
            return num_sent
        await asyncio.sleep(0.001)
    return 1000


async def test_a_new_connection_is_not_read_while_too_much_waits_for_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames without payloads count, too. Nothing is lost, however long that takes."""
    monkeypatch.setattr(renewal, "MAX_EARLY_BYTES", 1 << 20)
    limits = StreamLimits(silence_s=3.0, ping_after_s=1.0, max_waiting_bytes=8 << 20)
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT, limits)
        second.connection.send(pb.Continue(ticket=await first.ticket()))
        num_sent = await num_taken(second.connection)
        assert num_sent < 1000
        await asyncio.sleep(2 * limits.silence_s)
        assert not second.connection.ended.done()
        first.connection.send(pb.Continue())

        async def has_come() -> bool:
            return len(pair.server.numbers) == num_sent

        await until(has_come)
        assert pair.server.numbers == list(range(1, num_sent + 1))
        second.connection.close()


async def test_a_caller_that_never_says_continue_loses_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "NUM_STALLED_LOOKS", 4)
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT)
        second.connection.send(pb.Continue(ticket=await first.ticket()))
        assert (await first.frames.get()).control == pb.Continue()
        for _ in range(8):  # so long as the old connection brings something, the server waits
            first.connection.send(pb.Step(), bytes(10_000))
            await asyncio.sleep(0.5)
        assert not first.connection.ended.done()
        await asyncio.gather(first.end(), second.end())


async def test_a_server_that_never_says_continue_keeps_the_stream_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "NUM_STALLED_LOOKS", 4)
    identities = Identities(tmp_path)
    server, client = End(identities, SERVER), End(identities, CLIENT)
    taken: list[Stream] = []

    def accept(stream: Stream) -> Receiver:
        taken.append(stream)
        stream.send(pb.Renew(ticket=bytes(16)))
        return lambda frame: None

    listener, tasks = StreamListener("127.0.0.1", 0), TaskGroup()
    await listener.start(accept, LIMITS, trust=server.network.callers)
    client.network.start_renewal(tasks)
    stream = client.network.connect(f"127.0.0.1:{listener.port}", client.accept, LIMITS)

    async def is_given_up() -> bool:
        return len(taken) == 2 and taken[1].ended.done()

    await until(is_given_up)
    assert not stream.ended.done()
    await tasks.close()
    stream.close()
    await listener.close()


async def test_a_caller_learns_the_error_that_the_server_wrote_to_the_new_connection(tmp_path: Path) -> None:
    """The new connection has brought its last before the old one brings the server's Continue."""
    identities = Identities(tmp_path)
    server, client = End(identities, SERVER), End(identities, CLIENT)
    taken: list[Stream] = []

    def accept(stream: Stream) -> Receiver:
        taken.append(stream)
        if len(taken) == 1:
            stream.send(pb.Renew(ticket=bytes(16)))

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Continue) and frame.control.ticket:
                stream.send(pb.Step(step_id=2))
                stream.fail(QueueFull("too much"))

        return receive

    async def has_failed() -> bool:
        return len(taken) == 2 and taken[1].ended.done()

    listener = StreamListener("127.0.0.1", 0)
    await listener.start(accept, LIMITS, trust=server.network.callers)
    stream = client.network.connect(f"127.0.0.1:{listener.port}", client.accept, LIMITS)
    await until(has_failed)
    await asyncio.sleep(0.5)
    taken[0].send(pb.Step(step_id=1))
    taken[0].send(pb.Continue())
    taken[0].close()
    end = await asyncio.wait_for(stream.ended, HANGS_S)
    assert isinstance(end.error, QueueFull)
    assert client.numbers == [1, 2]
    await listener.close()


async def test_what_a_caller_sent_before_it_closed_the_stream_arrives(tmp_path: Path) -> None:
    """The new connection has brought its last before the old one brings the caller's Continue."""
    async with paired(tmp_path) as pair:
        first, second = Caller(pair, CLIENT), Caller(pair, CLIENT)
        second.connection.send(pb.Continue(ticket=await first.ticket()))
        assert (await first.frames.get()).control == pb.Continue()
        second.connection.send(pb.Step(step_id=3))
        second.connection.close()
        await second.end()
        await asyncio.sleep(0.5)
        first.connection.send(pb.Step(step_id=1))
        await asyncio.sleep(RENEWED_S)
        assert first.frames.empty()
        first.connection.send(pb.Step(step_id=2))
        first.connection.send(pb.Continue())
        assert (await first.end()).cause is StreamCause.CLOSED
        assert pair.server.numbers == [1, 2, 3]


async def test_a_caller_that_is_refused_tries_ever_more_seldom(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    server, client = End(identities, SERVER), End(identities, CLIENT)
    taken: list[Stream] = []

    def accept(stream: Stream) -> Receiver:
        taken.append(stream)
        if len(taken) == 1:
            stream.send(pb.Renew(ticket=bytes(16)))

        def receive(frame: Frame) -> None:
            if isinstance(frame.control, pb.Continue):
                raise RoleDenied("not here")
            stream.send(pb.Renew(ticket=bytes(16)))

        return receive

    listener, tasks = StreamListener("127.0.0.1", 0), TaskGroup()
    await listener.start(accept, LIMITS, trust=server.network.callers)
    client.network.start_renewal(tasks)
    began_s = time.monotonic()
    stream = client.network.connect(f"127.0.0.1:{listener.port}", client.accept, LIMITS)

    async def has_tried_again() -> bool:
        return len(taken[1:]) >= 2

    await asyncio.sleep(6)
    await until(has_tried_again)
    # At 0, 1 and 3 s; the next one at 7 s.
    assert 2 ** (len(taken[1:]) - 1) - 1 <= time.monotonic() - began_s
    assert not stream.ended.done()
    await tasks.close()
    stream.close()
    await listener.close()


async def test_a_stream_does_not_go_on_at_another_server(tmp_path: Path) -> None:
    """Whose address it is by now."""
    async with paired(tmp_path) as pair:
        pair.send()
        await pair.until_answered()
        peer = pair.stream.peer
        here, other = pair.identities.folder_of(*SERVER), pair.identities.folder_of(Role.BLOCK, "4")
        for name in (KEY_FILE, CERTIFICATE_FILE):
            write_private(here / name, (other / name).read_bytes())
        pair.take_changes()
        await asyncio.sleep(RENEWED_S)
        pair.send()
        await pair.until_answered()
        assert pair.stream.peer == peer
