"""Sessions between the plan and the heartbeat that reports them: none is lost, and equal replicas share a burst."""

from collections import Counter
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.planning.bookings import MOST_AGE_S, Booked, Bookings
from corolla.planning.candidates import SESSION_LOAD, candidates, chain_of
from corolla.planning.planner import plan
from corolla.planning.replicas import PlannedSession, Replicas
from corolla.v1 import blocks_pb2, common_pb2
from corolla.v1 import router_pb2 as pb

LAG_S = 0.25
MANY_TOKENS = 1 << 20


class Server:
    """A server whose heartbeats report its number of sessions."""

    def __init__(self, server_id: str, tokens_per_second: float = 100.0) -> None:
        self.num_sessions = 0
        self.placed = pb.PlacedServer(state=pb.SERVER_STATE_READY, span=common_pb2.BlockSpan(start=0, end=4))
        self.placed.server.server_id = server_id
        self.placed.server.decode_tokens_per_second = tokens_per_second
        self._numbers = count(1)
        self.beat()

    def beat(self) -> None:
        load = self.placed.load
        load.num_sessions, load.max_session_tokens = self.num_sessions, MANY_TOKENS
        load.heartbeat_number = next(self._numbers)


def placed(servers: list[Server]) -> dict[str, pb.PlacedServer]:
    """What a placement lists, by id."""
    listed = {}
    for each in servers:
        listed[each.placed.server.server_id] = pb.PlacedServer()
        listed[each.placed.server.server_id].CopyFrom(each.placed)
    return listed


def booked_at(bookings: Bookings, servers: list[Server], now_s: float) -> Booked:
    """What is booked on the server "s", once all loads are known."""
    bookings.hear(placed(servers), now_s)
    return bookings.booked("s", now_s)


def place(servers: list[Server], bookings: Bookings, now_s: float, num_tokens: int = 8) -> Server:
    """One session goes where the planner sends it."""
    bookings.hear(placed(servers), now_s)
    session = PlannedSession(num_tokens, booked=partial(bookings.booked, now_s=now_s))
    (hop,) = plan(Replicas(candidates(placed(servers).values())).usable(session), 4).hops
    bookings.book(chain_of([hop], "").hops, num_tokens, now_s)
    (taken,) = [each for each in servers if each.placed.server.server_id == hop.server.server_id]
    taken.num_sessions += 1
    return taken


@given(
    num_servers=st.integers(1, 5),
    num_sessions=st.integers(0, 80),
    beats=st.lists(st.tuples(st.integers(0, 79), st.integers(0, 4)), max_size=20),
)
def test_equals_share_a_burst_whenever_heartbeats_come(
    num_servers: int, num_sessions: int, beats: list[tuple[int, int]]
) -> None:
    servers = [Server(f"s{number}") for number in range(num_servers)]
    bookings = Bookings(lag_s=0.0)
    for number in range(num_sessions):
        for before, beating in beats:
            if before == number and beating < num_servers:
                servers[beating].beat()
        place(servers, bookings, now_s=number * 0.001)
    split = [each.num_sessions for each in servers]
    assert max(split) - min(split) <= 1


def test_a_faster_replica_gets_a_proportional_share() -> None:
    fast, slow = servers = [Server("fast", 120.0), Server("slow", 100.0)]
    bookings = Bookings(LAG_S)
    for _ in range(64):
        place(servers, bookings, 1.0)
    load = {each: 1 + SESSION_LOAD * each.num_sessions for each in servers}
    assert fast.num_sessions > slow.num_sessions > 20
    assert abs(load[fast] / load[slow] - 1.2) < 0.1


@given(st.lists(st.tuples(st.sampled_from(["place", "beat", "look"]), st.integers(0, 26)), max_size=40))
def test_bookings_count_each_session_and_none_twice_for_long(steps: list[tuple[str, int]]) -> None:
    """A server learns of a session at any time within the lag; here at its end."""
    server, bookings, now_s = Server("s"), Bookings(LAG_S), 0.0
    underway: list[float] = []
    num_placed = 0
    for what, num_ticks in steps:
        now_s += num_ticks / 64
        if what == "place":
            bookings.hear(placed([server]), now_s)
            bookings.book([common_pb2.Hop(server_id="s")], 8, now_s)
            underway.append(now_s)
            num_placed += 1
        elif what == "beat":
            arrived = [each for each in underway if each + LAG_S <= now_s]
            server.num_sessions += len(arrived)
            underway = [each for each in underway if each not in arrived]
            server.beat()
        booked = booked_at(bookings, [server], now_s)
        if now_s < MOST_AGE_S:
            assert server.placed.load.num_sessions + booked.num_sessions >= num_placed
    now_s += LAG_S
    server.num_sessions = num_placed
    server.beat()
    assert booked_at(bookings, [server], now_s) == Booked()


def test_room_is_booked_as_well() -> None:
    servers = [Server("a"), Server("b")]
    bookings = Bookings(LAG_S)
    split = Counter(place(servers, bookings, 1.0, MANY_TOKENS // 2).placed.server.server_id for _ in range(4))
    assert split == {"a": 2, "b": 2}
    replicas, booked = Replicas(candidates(placed(servers).values())), partial(bookings.booked, now_s=1.0)
    assert not any(each.has_pages for each in replicas.usable(PlannedSession(1, booked=booked)))
    # The hops have the last word.
    assert all(each.has_pages for each in replicas.usable(PlannedSession(0, booked=booked)))


def answer(server: Server, num_sessions: int, room: int = MANY_TOKENS) -> blocks_pb2.HopLoad:
    """What the server says of its load when it opens a session, or refuses to."""
    number = server.placed.load.heartbeat_number
    return blocks_pb2.HopLoad(num_sessions=num_sessions, max_session_tokens=room, heartbeat_number=number)


def test_an_answer_to_an_open_counts_the_sessions_of_others_until_a_heartbeat_does() -> None:
    server, bookings = Server("s"), Bookings(LAG_S)
    for _ in range(3):
        place([server], bookings, 1.0)
    # The first of three opens has its answer, which counts six sessions of others.
    bookings.hear_answer("s", answer(server, 7, MANY_TOKENS - 100))
    assert bookings.booked("s", 1.0) == Booked(9, 116)
    older = answer(server, 99)
    server.num_sessions = 9
    server.beat()
    assert booked_at(bookings, [server], 2.0) == Booked()
    bookings.hear_answer("s", older)
    bookings.hear_answer("unknown", answer(server, 9))
    assert bookings.booked("s", 2.0) == bookings.booked("unknown", 2.0) == Booked()


@pytest.mark.parametrize("number", [0, 2**64 - 1])
@pytest.mark.parametrize("room", [0, 2**64 - 1])
@pytest.mark.parametrize("num_sessions", [0, 2**32 - 1])
def test_a_server_harms_itself_alone_with_what_it_says_of_its_load(num_sessions: int, room: int, number: int) -> None:
    liar, honest = servers = [Server("liar"), Server("honest")]
    bookings = Bookings(LAG_S)
    bookings.hear(placed(servers), 1.0)
    for _ in range(100):
        bookings.hear_answer(
            "liar",
            blocks_pb2.HopLoad(num_sessions=num_sessions, max_session_tokens=room, heartbeat_number=number),
        )
    for _ in range(16):
        place(servers, bookings, 1.0)
    assert honest.num_sessions >= 8
    assert liar.num_sessions + honest.num_sessions == 16


def test_bookings_that_were_never_opened_expire() -> None:
    servers, bookings = [Server("s")], Bookings(LAG_S)
    place(servers, bookings, 1.0)
    assert booked_at(bookings, servers, 1.0 + MOST_AGE_S - 0.1) == Booked(1, 8)
    assert booked_at(bookings, servers, 1.0 + MOST_AGE_S) == Booked()
    place(servers, bookings, 20.0)
    assert booked_at(bookings, [], 20.1) == Booked()
    assert booked_at(bookings, servers, 20.2) == Booked(), "another server may have come under its name"
