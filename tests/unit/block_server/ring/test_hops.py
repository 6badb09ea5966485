"""First and last hop of a ring: what goes on, what waits, what comes too late. Sessions are real, nothing computes."""

from collections.abc import Callable, Sequence
from typing import cast

import pytest
from google.protobuf.message import Message

from corolla.block_server.hop_session import HopSession, OpenRequest, RingPlace
from corolla.block_server.peers import Peer, PeerTable, StepFaults
from corolla.block_server.relay import Relay
from corolla.block_server.ring.first_hop import FirstHop
from corolla.block_server.ring.last_hop import LastHop, RowChoice
from corolla.block_server.row_sampling import ChosenTokens
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from corolla.chassis.errors import CorollaError, HopSessionLost
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from tests.unread_stream import UnreadStream

SPAN = Span(0, 2)
ROUTE = (common_pb2.Hop(address="b:1", span=common_pb2.BlockSpan(start=2, end=4)),)
CLIENT = b"c" * 16


class NotedRelay(Relay):
    """Sends nothing to other servers."""

    sent: list[tuple[str, pb.Step | pb.Next]]

    def __init__(self, fingerprint: str, peers: PeerTable, first_hop: Callable[[pb.Next], None]) -> None:
        super().__init__(fingerprint, peers, first_hop)
        self.sent = []

    def send(self, address: str, step: pb.Step | pb.Next, payload: Buffer = b"") -> None:
        self.sent.append((address, step))


class Ring:
    """A first hop whose steps are only noted, over a table of real sessions."""

    def __init__(self, max_microbatches: int = 0, num_devices: Callable[[Sequence[str]], int] = len) -> None:
        pool = PagePool(num_pages=100, page_tokens=4)
        self.sessions: SessionTable[SessionPages] = SessionTable(pool, lambda: SessionPages(pool, [GroupRule()]))
        self.steps: list[pb.Step] = []
        self.faults: list[tuple[str, list[bytes]]] = []
        self.now_s = 0.0
        self.first_hop = FirstHop(
            self.sessions,  # type: ignore[arg-type]
            self.steps.append,
            cast(StepFaults, self),
            lambda: self.now_s,
            max_microbatches=max_microbatches,
            num_devices=num_devices,
        )
        self.peers = PeerTable()
        self.relay = NotedRelay("", self.peers, self.first_hop.on_next)
        self.relayed = self.relay.sent
        self.last_hop = LastHop(self.sessions, self.peers, self.relay)  # type: ignore[arg-type]

    def open(
        self, name: bytes, epoch: int = 1, credit_end: int = 100, blocks: Span = SPAN, tenant: str = "t"
    ) -> HopSession[SessionPages]:
        request = OpenRequest(
            session_id=name * 16, epoch=epoch, tenant=tenant, client_id=CLIENT, resume=True, max_tokens=12,
            blocks=blocks, lease_s=10.0, transient=True,
        )  # fmt: skip
        session = self.sessions.open(request, 0.0)
        session.ring = RingPlace("a:1", ROUTE, 8, credit_end)
        return session

    def come_round(self, microbatch: int, *names: bytes, position: int = 5, epoch: int = 1) -> None:
        rows = [
            pb.StepRow(session_id=name * 16, epoch=epoch, position=position, num_tokens=1, client_id=CLIENT)
            for name in names
        ]
        self.first_hop.on_next(pb.Next(microbatch=microbatch, rows=rows))

    @property
    def sent(self) -> list[tuple[int, bytes]]:
        """Number and sessions of each microbatch."""
        return [(step.ring.microbatch, b"".join(row.session_id[:1] for row in step.rows)) for step in self.steps]

    def send(self, step: pb.Next, error: CorollaError, rows: Sequence[pb.StepRow]) -> None:
        """Notes a fault that the first hop sends."""
        self.faults.append((error.reason, [row.session_id[:1] for row in rows]))


def test_as_many_microbatches_are_under_way_as_hops_and_rows_wait_for_one_of_them() -> None:
    ring = Ring()
    for name in (b"1", b"2", b"3", b"4"):
        ring.open(name)
        ring.come_round(0, name)
    assert ring.sent == [(1, b"1"), (2, b"2")]
    assert ring.first_hop.num_waiting == 2
    ring.come_round(1, b"1", position=6)
    assert ring.sent[2:] == [(3, b"34")]
    ring.come_round(2, b"2", position=6)
    assert ring.sent[3:] == [(4, b"12")]
    step = ring.steps[-1]
    assert (step.route[0], step.samples, step.client_id) == (ROUTE[0], True, b"")
    assert [row.client_id for row in step.rows] == [CLIENT] * 2


@pytest.mark.parametrize("most, num_under_way", [(1, 1), (2, 2), (9, 2)])
def test_fewer_microbatches_are_under_way_where_that_is_said(most: int, num_under_way: int) -> None:
    ring = Ring(max_microbatches=most)
    for name in (b"1", b"2", b"3", b"4"):
        ring.open(name)
        ring.come_round(0, name)
    assert len(ring.sent) == num_under_way
    ring.come_round(1, b"1", position=6)
    assert ring.sent[-1] == (num_under_way + 1, b"2341" if most == 1 else b"34")


def test_hops_on_one_device_get_one_microbatch() -> None:
    asked: list[Sequence[str]] = []

    def num_devices(addresses: Sequence[str]) -> int:
        asked.append(addresses)
        return 1

    ring = Ring(num_devices=num_devices)
    for name in (b"1", b"2", b"3"):
        ring.open(name)
        ring.come_round(0, name)
    assert ring.sent == [(1, b"1")]
    ring.come_round(1, b"1", position=6)
    assert ring.sent[1:] == [(2, b"231")]
    assert all(addresses[1:] == ["b:1"] and len(addresses) == 2 for addresses in asked)


def test_a_tenants_many_rows_do_not_go_before_another_ones_few() -> None:
    ring = Ring()
    noisy = [bytes([each]) for each in b"abcdefghijklmnopqrstuvwx"]
    for name in noisy:
        ring.open(name)
        ring.come_round(0, name)
    for name in (b"1", b"2"):
        ring.open(name, tenant="quiet")
        ring.come_round(0, name)
    # More wait than a microbatch may have: eight, and each tenant in the order in which its own came.
    ring.come_round(1, b"a", position=6)
    assert ring.sent[2:] == [(3, b"c1d2efgh")]
    ring.come_round(2, b"b", position=6)
    assert ring.sent[3:] == [(4, b"ijklmnop")]


def test_where_rows_cost_time_a_tenant_next_to_another_one_has_few_of_them() -> None:
    ring, noisy = Ring(), b"abcdefghijklmnop"
    for name in noisy:
        ring.open(bytes([name]))
    position = 5

    def a_round() -> None:
        """All microbatches come round, after 10 ms and 5 ms for each row of theirs."""
        nonlocal position
        position += 1
        latest = ring.sent[-2:]
        ring.now_s += 0.01 + 0.005 * sum(len(names) for _, names in latest)
        for number, names in latest:
            ring.come_round(number, *(bytes([each]) for each in names), position=position)

    for name in noisy:
        ring.come_round(0, bytes([name]), position=position)
        a_round()
    # Its prompt is not through yet: it will have one row, and two rows take as long as a round without any.
    quiet = ring.open(b"1", tenant="quiet")
    ring.first_hop.on_tenants(["quiet"])
    a_round()
    assert all(len(names) <= 2 for _, names in ring.sent[-2:])
    ring.come_round(0, b"1", position=position)
    for _ in range(24):
        a_round()
    sent = [names for _, names in ring.sent[-24:]]
    assert max(len(set(names) & set(noisy)) for names in sent) == 2
    assert sum(b"1" in names for names in sent) >= 12
    # None of the others is left out.
    assert set(b"".join(sent)) == {*noisy, *b"1"}
    ring.sessions.end(quiet.request.session_id, 1)
    for _ in range(8):
        a_round()
    assert max(len(names) for _, names in ring.sent[-2:]) == 8


def test_tenants_share_rounds_that_take_longer_than_a_tenant_is_remembered() -> None:
    ring, noisy = Ring(), b"abcdefghijklmnop"
    for name in noisy + b"1":
        ring.open(bytes([name]), tenant="quiet" if name in b"1" else "t")
    position = 5

    def a_round() -> None:
        nonlocal position
        position += 1
        latest = ring.sent[-2:]
        for number, names in latest:
            ring.now_s += 0.05 + 0.1 * len(names)
            ring.come_round(number, *(bytes([each]) for each in names), position=position)

    for name in noisy + b"1":
        ring.come_round(0, bytes([name]), position=position)
        a_round()
    for _ in range(24):
        a_round()
    sent = [names for _, names in ring.sent[-24:]]
    assert max(len(set(names) & set(noisy)) for names in sent) <= 2
    assert sum(b"1" in names for names in sent) >= 8


def test_where_rows_cost_no_time_none_waits_for_another_tenants_sake() -> None:
    ring, names = Ring(), b"abcdefgh"
    for name in names + b"1":
        ring.open(bytes([name]), tenant="quiet" if name in b"1" else "t")
        ring.come_round(0, bytes([name]))
    for position in range(6, 12):
        ring.now_s += 0.01
        for number, sent in ring.sent[-2:]:
            ring.come_round(number, *(bytes([each]) for each in sent), position=position)
    assert set(b"".join(sent for _, sent in ring.sent[-2:])) == set(names + b"1")


def test_what_comes_round_twice_or_late_begins_nothing() -> None:
    ring = Ring()
    session = ring.open(b"1", epoch=2)
    session.newest_ring_position = 5
    ring.come_round(0, b"1", epoch=2, position=5)
    ring.come_round(0, b"1", epoch=1, position=9)
    assert (ring.steps, ring.faults) == ([], [])
    ring.come_round(0, b"1", epoch=2, position=6)
    assert ring.sent == [(1, b"1")]


def test_the_client_of_a_session_that_is_lost_learns_of_it_and_that_of_an_ended_one_does_not() -> None:
    ring = Ring()
    ring.open(b"1")
    ring.sessions.end(b"1" * 16, 1)
    ring.open(b"2")
    ring.sessions.truncate(b"2" * 16, 1, 0, idle=True)
    ring.come_round(0, b"1", b"2", b"3")
    assert ring.faults == [(HopSessionLost.reason, [b"3"])]
    assert not ring.steps


def test_a_microbatch_whose_sessions_are_gone_gives_its_place_back() -> None:
    ring = Ring()
    for name in (b"1", b"2", b"3"):
        ring.open(name)
        ring.come_round(0, name)
    assert ring.sent == [(1, b"1"), (2, b"2")]
    ring.sessions.end(b"1" * 16, 1)
    ring.first_hop.settle()
    assert ring.sent[2:] == [(3, b"3")]
    # Opened anew: what is under way of the epoch before does not come round any more.
    ring.open(b"2", epoch=2)
    ring.open(b"4")
    ring.come_round(0, b"4")
    assert ring.first_hop.num_waiting == 1
    ring.first_hop.settle()
    assert ring.sent[3:] == [(4, b"4")]
    for name in (b"2", b"3", b"4"):
        ring.sessions.end(name * 16, 2)
    ring.first_hop.settle()
    assert ring.first_hop.num_waiting == 0


def test_a_microbatch_of_which_no_word_came_round_gives_its_place_back_in_time() -> None:
    ring = Ring()
    ring.open(b"1")
    ring.open(b"2")
    ring.come_round(0, b"1")
    ring.come_round(0, b"2")
    ring.open(b"3")
    ring.come_round(0, b"3")
    ring.first_hop.settle()
    assert [names for _, names in ring.sent] == [b"1", b"2"]
    ring.now_s += 6
    ring.first_hop.settle()
    assert [names for _, names in ring.sent] == [b"1", b"2", b"3"]


def test_whichever_hop_loses_the_last_row_of_a_microbatch_says_so() -> None:
    ring = Ring()
    for name in (b"1", b"2", b"3"):
        ring.open(name)
        ring.come_round(0, name)
    ring.relay.give_up(ring.steps[0])
    assert ring.sent[2:] == [(3, b"3")]
    behind = pb.Step(blocks=common_pb2.BlockSpan(start=2, end=4), ring=ring.steps[1].ring)
    ring.relay.give_up(behind)
    assert ring.relayed == [("a:1", pb.Next(microbatch=2))]


def test_a_session_waits_at_most_once() -> None:
    ring = Ring()
    for name in (b"1", b"2", b"3"):
        ring.open(name)
        ring.come_round(0, name)
    ring.come_round(0, b"3")
    ring.come_round(0, b"3", position=6)
    ring.come_round(1)
    assert ring.sent[2:] == [(3, b"3")]


def test_sessions_share_a_microbatch_only_where_all_that_they_say_of_their_ring_is_equal() -> None:
    ring = Ring()
    ring.open(b"1").ring = RingPlace("elsewhere:1", ROUTE, 8, 100)
    ring.open(b"2").ring = RingPlace("a:1", ROUTE, 9, 100)
    ring.open(b"3")
    ring.open(b"4")
    ring.come_round(0, b"1", b"2", b"3", b"4")
    assert [(names, step.ring.first_address) for (_, names), step in zip(ring.sent, ring.steps, strict=True)] == [
        (b"1", "elsewhere:1"), (b"2", "a:1"), (b"3", "a:1"), (b"4", "a:1"),
    ]  # fmt: skip


def test_a_client_whose_session_another_one_has_now_learns_of_it() -> None:
    ring = Ring()
    session = ring.open(b"1", epoch=2)
    other = b"d" * 16
    row = pb.StepRow(session_id=b"1" * 16, epoch=1, position=5, num_tokens=1, client_id=other)
    ring.first_hop.on_next(pb.Next(rows=[row]))
    assert ring.faults == [(HopSessionLost.reason, [b"1"])]
    assert session.newest_ring_position == -1


def choice(session: HopSession[SessionPages], row: pb.StepRow, *token_ids: int, drafts: Sequence[int] = (),
           is_last: bool = False) -> RowChoice:  # fmt: skip
    tokens = [pb.SampledToken(token_id=token_id) for token_id in token_ids]
    sampled = pb.SampledRow(tokens=tokens, is_last=is_last)
    return row, session, ChosenTokens(sampled, drafts)  # type: ignore[return-value]


def row_of(session: HopSession[SessionPages], position: int, num_tokens: int, num_result_tokens: int) -> pb.StepRow:
    request = session.request
    return pb.StepRow(session_id=request.session_id, epoch=request.epoch, position=position, num_tokens=num_tokens,
                      num_result_tokens=num_result_tokens)  # fmt: skip


@pytest.mark.parametrize(
    "num_tokens, num_result_tokens, token_ids, position",
    [(1, 1, [7], 6), (4, 1, [7], 9), (4, 4, [1, 2, 7], 8)],
    ids=["one token", "end of a prompt", "draft tokens"],
)
def test_the_next_step_begins_with_the_newest_token_behind_those_that_hops_hold(
    num_tokens: int, num_result_tokens: int, token_ids: list[int], position: int
) -> None:
    ring = Ring()
    session = ring.open(b"1")
    row = row_of(session, 5, num_tokens, num_result_tokens)
    (next_row,) = ring.last_hop.next_rows([choice(session, row, *token_ids, drafts=range(20))])
    assert (next_row.position, next_row.token_ids[0], next_row.client_id) == (position, 7, CLIENT)
    # The row has as many draft tokens as a step has room for.
    assert next_row.token_ids[1:] == list(range(7))
    assert next_row.num_tokens == next_row.num_result_tokens == 8


def test_an_answer_that_ended_does_not_go_on() -> None:
    ring = Ring()
    session = ring.open(b"1")
    row = row_of(session, 5, 1, 1)
    assert ring.last_hop.next_rows([choice(session, row, 7, is_last=True), choice(session, row)]) == []
    # A first hop waits for each of its own microbatches to come round; a client's step does not count among them.
    step = pb.Step(blocks=common_pb2.BlockSpan(start=2, end=4), ring=pb.Ring(first_address="a:1"))
    ring.last_hop.send_next(step, [])
    assert ring.relayed == []
    step.ring.microbatch = 3
    ring.last_hop.send_next(step, [])
    assert ring.relayed == [("a:1", pb.Next(microbatch=3))]


@pytest.mark.parametrize("blocks", [Span(2, 4), Span(0, 4)], ids=["several hops", "one hop"])
def test_a_session_without_credit_waits_until_it_has_some(blocks: Span) -> None:
    ring = Ring()
    session = ring.open(b"1", credit_end=6, blocks=blocks)
    peer = Peer(CLIENT, UnreadStream())
    assert ring.last_hop.next_rows([choice(session, row_of(session, 5, 1, 1), 7)]) == []
    for epoch, end in ((1, 6), (2, 100), (1, 3)):
        ring.last_hop.on_credit(pb.Credit(session_id=b"1" * 16, epoch=epoch, end=end), peer)
    assert (ring.relayed, ring.steps) == ([], [])
    for _ in range(2):
        ring.last_hop.on_credit(pb.Credit(session_id=b"1" * 16, epoch=1, end=7), peer)
    rows = [row for _, message in ring.relayed for row in message.rows] + [
        row for step in ring.steps for row in step.rows
    ]
    assert [(row.position, list(row.token_ids)) for row in rows] == [(6, [7])]
    # It has used that up.
    assert ring.last_hop.next_rows([choice(session, row_of(session, 6, 1, 1), 8)]) == []


def test_a_client_that_grants_credit_to_a_lost_session_learns_of_it() -> None:
    ring = Ring()

    frames: list[Message] = []

    class Sent(UnreadStream):
        def send(self, control: Message, payload: Buffer = b"") -> None:
            frames.append(control)

    peer = Peer(CLIENT, Sent())
    ring.peers.add(peer)
    ring.open(b"2")
    ring.sessions.end(b"2" * 16, 1)
    for name in (b"1", b"2"):
        ring.last_hop.on_credit(pb.Credit(session_id=name * 16, epoch=1, end=7), peer)
    (fault,) = frames
    assert isinstance(fault, pb.Fault)
    assert [row.session_id[:1] for row in fault.rows] == [b"1"]
    assert fault.reason == HopSessionLost.reason
