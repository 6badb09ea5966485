"""A block server is ready once another one has reached it, and connects to servers of the placement only."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import pytest

from corolla.block_server import meetings
from corolla.block_server.meetings import MOST_ASKED, MOST_LOST, Meetings
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import Peer
from corolla.chassis.errors import MalformedMessage, RouterUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2, router_pb2
from corolla.wire.frames import Frame
from corolla.wire.stream import Receiver, Stream, StreamListener, connect
from tests.integration.waiting import until

FINGERPRINT = "weights"


class Place:
    """A placement, and the servers that a test made."""

    def __init__(self) -> None:
        self.servers: list[router_pb2.PlacedServer] = []
        self.made: list[Server] = []

    async def placement(self) -> Sequence[router_pb2.PlacedServer]:
        return self.servers

    def add(self, address: str, state: "router_pb2.ServerState.ValueType") -> None:
        described = router_pb2.ServerDescription(address=address, fingerprint=FINGERPRINT)
        self.servers.append(router_pb2.PlacedServer(server=described, state=state))


class Server:
    """What a block server does with streams, as far as meetings go."""

    def __init__(self, place: Place, state: "router_pb2.ServerState.ValueType") -> None:
        self.listener, self.tasks = StreamListener("127.0.0.1", 0), TaskGroup()
        self.address = f"127.0.0.1:{self.listener.port}"
        neighbours = Neighbours(place.placement, self.tasks)
        self.reported, self.changes = list[str](), list[tuple[str, ...]]()
        self.meetings = Meetings(
            self.address, FINGERPRINT, neighbours, connect, place.placement, self.tasks, self._report,
            lambda: self.changes.append(self.meetings.unreachable),
        )  # fmt: skip
        self.num_callers = 0
        place.add(self.address, state)
        place.made.append(self)

    async def _report(self, server_id: str) -> None:
        self.reported.append(server_id)
        raise RouterUnavailable("away")

    async def open(self) -> None:
        await self.listener.start(self._accept)

    def _accept(self, stream: Stream) -> Receiver:
        self.num_callers += 1
        peer = Peer(b"", stream)

        def receive(frame: Frame) -> None:
            match frame.control:
                case pb.Hello():
                    stream.send(pb.Welcome(server_id="s", span=common_pb2.BlockSpan(start=0, end=5)))
                case pb.Meet():
                    self.meetings.answer(frame.control, peer)

        return receive


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    yield place
    for each in place.made:
        await each.tasks.close()
        await each.listener.close()


def is_idle() -> bool:
    """No server looks at what it lost, or for others."""
    return not {"lost neighbours", "look for a neighbour"} & {task.get_name() for task in asyncio.all_tasks()}


READY, JOINING = router_pb2.SERVER_STATE_READY, router_pb2.SERVER_STATE_JOINING


async def test_the_first_server_waits_for_nobody(place: Place) -> None:
    await Server(place, JOINING).meetings.meet_all()


async def test_a_server_is_met_by_all_that_are_ready(place: Place) -> None:
    others, own = [Server(place, READY), Server(place, READY), Server(place, JOINING)], Server(place, JOINING)
    for each in (*others, own):
        await each.open()
    await own.meetings.meet_all()
    assert own.meetings.unreachable == ()
    assert [each.num_callers for each in others] == [1, 1, 0]
    assert own.num_callers == 2


async def test_a_server_that_nobody_reaches_is_not_ready_until_its_port_is_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "AGAIN_S", 0.05)
    other, own = Server(place, READY), Server(place, JOINING)
    await other.open()
    tried = asyncio.Event()

    async def ready() -> Sequence[router_pb2.PlacedServer]:
        if own.meetings.unreachable:
            tried.set()
        return place.servers

    own.meetings.placement = ready
    # No process listens at the address yet, so connections are refused.
    meeting = asyncio.create_task(own.meetings.meet_all())
    async with asyncio.timeout(20):
        await tried.wait()
        assert own.meetings.unreachable == (other.address,)
        await own.open()
        await meeting
    assert not own.meetings.unreachable


async def test_a_server_that_is_gone_holds_nobody_up_and_the_pair_is_shown(place: Place) -> None:
    place.add("127.0.0.1:1", READY)
    other, own = Server(place, READY), Server(place, JOINING)
    await other.open()
    await own.open()
    await own.meetings.meet_all()
    assert own.meetings.unreachable == ("127.0.0.1:1",)


async def test_a_server_that_reaches_none_waits_until_their_leases_have_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "AGAIN_S", 0.0)
    place.add("127.0.0.1:1", READY)
    own = Server(place, JOINING)
    num_looks = 0

    async def placement() -> Sequence[router_pb2.PlacedServer]:
        nonlocal num_looks
        num_looks += 1
        return place.servers if num_looks <= 3 else []

    own.meetings.placement = placement
    await own.meetings.meet_all()
    assert num_looks == 4
    assert own.meetings.unreachable == ()


async def test_of_very_many_servers_some_are_asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 200):
        place.add(f"127.0.0.1:{number}", READY)
    own = Server(place, JOINING)
    monkeypatch.setattr(meetings, "AGAIN_S", 1000.0)
    meeting = asyncio.create_task(own.meetings.meet_all())
    await until(lambda: bool(own.meetings.unreachable))
    assert len(own.meetings.unreachable) <= MOST_ASKED
    meeting.cancel()


async def test_pairs_stay_known_without_a_router(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "LOOK_INTERVAL_S", 0.01)
    other, own = Server(place, READY), Server(place, JOINING)
    for each in (other, own):
        await each.open()
    await own.meetings.meet_all()
    await other.listener.close()
    own.meetings.lost(other.address)
    running = asyncio.create_task(own.meetings.run())
    await until(lambda: bool(own.meetings.unreachable))
    assert own.meetings.unreachable == (other.address,)
    num_looks = 0

    async def away() -> Sequence[router_pb2.PlacedServer]:
        nonlocal num_looks
        num_looks += 1
        raise RouterUnavailable("away")

    own.meetings.placement = away
    await until(lambda: num_looks >= 4)
    assert own.meetings.unreachable == (other.address,)
    running.cancel()


async def test_a_lost_neighbour_is_named_and_reported_once_and_then_asked(place: Place) -> None:
    other, own = Server(place, READY), Server(place, READY)
    for each in (other, own):
        await each.open()
    place.servers[0].server.server_id = "other"
    await own.meetings.meet_all()
    own.meetings.lost(other.address)
    own.meetings.lost(other.address)
    await until(lambda: len(own.changes) == 2)
    assert own.changes == [(other.address,), ()]
    assert own.reported == ["other"]
    assert other.num_callers == 2, "it is asked once more, and reaches the one that asks"
    await other.listener.close()
    own.meetings.lost(other.address)
    await until(lambda: len(own.reported) == 2)
    assert own.meetings.unreachable == (other.address,)
    await until(is_idle)
    # A server that the placement names at this address later is another one.
    place.servers[0].server.server_id = "restarted"
    own.meetings.neighbours.look_again(lambda _: None)
    await until(lambda: not own.meetings.unreachable)
    own.meetings.lost(other.address)
    await until(lambda: len(own.reported) == 3)
    assert own.reported == ["other", "other", "restarted"]
    assert own.meetings.unreachable == (other.address,)
    own.meetings.neighbours.look_again(lambda _: None)
    await until(is_idle)
    assert own.meetings.unreachable == (other.address,), "it is still the same one"
    # A server that comes to the address meets this one.
    following = Server(Place(), JOINING)
    following.address = following.meetings.address = other.address
    following.listener = StreamListener("127.0.0.1", other.listener.port)
    await following.open()
    following.meetings.placement = place.placement
    await following.meetings.meet_all()
    assert not list(own.meetings.unreachable)
    await following.tasks.close()
    await following.listener.close()


@pytest.mark.parametrize("num_lost", [1, MOST_LOST, MOST_LOST + 1])
async def test_servers_that_left_or_were_lost_together_are_not_apart(place: Place, num_lost: int) -> None:
    own, looks = Server(place, READY), list[int]()
    await own.meetings.meet_all()

    async def placement() -> Sequence[router_pb2.PlacedServer]:
        looks.append(1)
        return place.servers

    own.meetings.placement = placement
    for number in range(num_lost):
        if num_lost > MOST_LOST:
            place.add(f"127.0.0.1:{number + 1}", READY)
    own.meetings.neighbours.look_again(lambda _: None)
    await until(is_idle)
    for number in range(num_lost):
        own.meetings.lost(f"127.0.0.1:{number + 1}")
    await until(is_idle)
    assert own.changes == []
    assert not looks, "many servers lose the same neighbour, and do not all ask for the whole placement"


async def test_one_peer_has_one_meeting_at_a_time_and_all_have_few(place: Place) -> None:
    asked = Server(place, READY)
    streams = [connect(asked.address, lambda _: lambda _frame: None) for _ in range(40)]
    num_before = len(asyncio.all_tasks())
    for stream in streams:
        peer = Peer(b"", stream)
        for _ in range(10):
            asked.meetings.answer(pb.Meet(address="127.0.0.1:1"), peer)
    assert len(asyncio.all_tasks()) - num_before <= 17  # one more looks for the address
    for stream in streams:
        stream.abort()


async def test_nobody_has_a_server_connect_to_an_address_that_the_placement_does_not_name(place: Place) -> None:
    asked, stranger = Server(place, READY), Server(Place(), READY)
    for each in (asked, stranger):
        await each.open()
    stream = connect(asked.address, lambda _: lambda _frame: None)
    stream.send(pb.Hello(fingerprint=FINGERPRINT))
    stream.send(pb.Meet(address=stranger.address))
    # A server that is placed is answered later than the stranger would have been.
    own = Server(place, JOINING)
    await own.open()
    await own.meetings.meet_all()
    assert (own.num_callers, stranger.num_callers) == (1, 0)
    stream.close()
    with suppress(asyncio.CancelledError):
        await stream.ended
    await stranger.tasks.close()
    await stranger.listener.close()


async def test_client_services_have_no_address_to_be_met_at(place: Place) -> None:
    asked = Server(place, READY)
    stream = connect(asked.address, lambda _: lambda _frame: None)
    with pytest.raises(MalformedMessage):
        asked.meetings.answer(pb.Meet(address=asked.address), Peer(b"c" * 16, stream))
    with pytest.raises(MalformedMessage):
        asked.meetings.answer(pb.Meet(address="x" * 600), Peer(b"", stream))
    stream.abort()
