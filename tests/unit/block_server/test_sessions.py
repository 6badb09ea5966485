"""The sessions of a hop, against a model of its promises, for any order of requests."""

from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from corolla.block_server.beginnings import MOST_ANNOUNCED, AnnouncedBeginnings, named_in
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import UNCLAIMED_LEASE_S, HopSession, OpenRequest, SessionEvent, SessionState
from corolla.block_server.invariants import check
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.prefixes import ExpectedText, PrefixKey
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from corolla.chassis.errors import (
    CorollaError,
    HopLeaving,
    HopSessionLost,
    MalformedMessage,
    OutOfPages,
    PositionGap,
    StaleEpoch,
)
from corolla.compute.prompts import BlockPrompts
from corolla.trust.workload import Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.beginnings import pack, unpack
from corolla.wire.span import Span

NUM_PAGES, PAGE_TOKENS = 12, 4
BLOCKS = (Span(0, 2), Span(0, 3))
CLIENTS = (b"c" * 16, b"d" * 16)
HASHES = tuple(bytes([number]) * 16 for number in range(6))


def a_request(session_id: bytes = b"s", **changes: Any) -> OpenRequest:
    request = OpenRequest(
        session_id=session_id, epoch=1, tenant="t", client_id=CLIENTS[0], resume=True, max_tokens=8,
        blocks=BLOCKS[0], lease_s=10.0, transient=False,
    )  # fmt: skip
    return replace(request, **changes)


def a_table(max_prompt_bytes: int = 0) -> SessionTable[SessionPages]:
    pool = PagePool(NUM_PAGES, PAGE_TOKENS)
    return SessionTable(pool, lambda: SessionPages(pool, [GroupRule()]), max_prompt_bytes=max_prompt_bytes)


def step(table: SessionTable[SessionPages], request: OpenRequest, position: int, num_tokens: int, now_s: float = 0.0,
         **changes: Any) -> HopSession[SessionPages]:  # fmt: skip
    """A step as the engine makes it: checked, then computed."""
    given = {"epoch": request.epoch, "client_id": request.client_id, "blocks": request.blocks, **changes}
    held = table.for_step(
        request.session_id, given["epoch"], given["client_id"], position, num_tokens, given["blocks"], now_s
    )
    held.cache.truncate(position)
    held.cache.make_writable(position, num_tokens)
    held.cache.commit(position + num_tokens)
    return held


class Hop(RuleBasedStateMachine):
    """Opens, steps, truncates, closes, expires and evicts in any order, stale requests among them."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.table = a_table()
        self.now_s = 0.0

    @rule(target=ids, number=st.integers(0, 5))
    def name(self, number: int) -> bytes:
        return bytes([number])

    def held(self, session_id: bytes) -> HopSession[SessionPages] | None:
        return next((held for held in self.table if held.request.session_id == session_id), None)

    def snapshot(self) -> list[tuple[OpenRequest, int, int, float, bool]]:
        return sorted(
            (
                (held.request, held.cache.num_tokens, held.num_pages, held.lease_deadline_s, held.is_idle)
                for held in self.table
            ),
            key=lambda facts: facts[0].session_id,
        )

    @rule(
        session_id=ids, epoch=st.integers(1, 6), tenant=st.sampled_from("tu"), client_id=st.sampled_from(CLIENTS),
        resume=st.booleans(), max_tokens=st.integers(1, NUM_PAGES * PAGE_TOKENS + 8), blocks=st.sampled_from(BLOCKS),
        transient=st.booleans(), long_factors=st.booleans(), num_hashes=st.integers(0, len(HASHES)),
        write_start=st.sampled_from([0, 0, 10, 100]),
    )  # fmt: skip
    def open(self, session_id: bytes, num_hashes: int, **fields: Any) -> None:
        request = OpenRequest(session_id=session_id, lease_s=5.0, **fields)
        if num_hashes:
            # The salt of a text has its tenant and blocks in it.
            salt = repr((request.tenant, request.blocks, request.long_factors)).encode()
            text = ExpectedText(salt, HASHES[:num_hashes], num_hashes * PAGE_TOKENS + 1)
            request = replace(request, text=text)
        before, held = self.snapshot(), self.held(session_id)
        fits = self.fits(request, held)
        tokens_before = held.cache.num_tokens if held else 0
        way_before = (held.request.blocks, held.request.long_factors) if held else None
        epoch_before, idle_before = (held.request.epoch, held.is_idle) if held else (0, False)
        try:
            opened = self.table.open(request, self.now_s)
        except HopSessionLost:
            assert held is not None
            assert held.request.tenant != request.tenant
        except StaleEpoch:
            assert held is not None
            assert held.request.epoch >= request.epoch
            taken_back = (held.is_idle or held.is_unclaimed) and held.request.client_id == request.client_id
            assert held.request.epoch > request.epoch or not taken_back
        except OutOfPages:
            assert not fits
        else:
            assert fits
            may_keep = request.resume and way_before == (request.blocks, request.long_factors)
            num_kept = min(tokens_before, request.max_tokens) if may_keep else 0
            assert opened.cache.num_tokens == num_kept or (not num_kept and num_hashes)
            num_pages = self.table.pool.pages_for(request.max_tokens)
            assert opened.num_pages + opened.cache.num_common_pages == num_pages
            assert opened.cache.common_end <= request.write_start
            assert opened.request == request
            assert not opened.is_idle
            assert epoch_before < request.epoch or (epoch_before == request.epoch and idle_before)
            return
        assert self.snapshot() == before, "what is refused changes nothing"

    def fits(self, request: OpenRequest, held: HopSession[SessionPages] | None) -> bool:
        """Whether a session has room once all others that are idle are gone: it counts page by page."""
        pool = self.table.pool
        most_common = min(request.write_start, request.max_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
        common: list[int] = []
        keeps = held is not None and request.resume and held.request.agrees_with(request)
        if keeps:
            assert held is not None
            (table,) = held.cache.tables
            common = list(table.pages[: table.num_common])
        if request.text is not None and not (keeps and held is not None and held.cache.num_tokens):
            hashes = request.text.hashes[: request.max_tokens // PAGE_TOKENS]
            found = [pool.find_prefix(PrefixKey(request.text.salt, each, 0)) for each in hashes]
            cached = list(takewhile(lambda page: page is not None, found))
            common = [page for page in cached if page is not None] or common
        common = common[:most_common]
        others = [each for each in self.table if each is not held and not each.is_idle]
        taken = {page for each in others for table in each.cache.tables for page in table.pages[: table.num_common]}
        num_more = pool.pages_for(request.max_tokens) - len(common) + len(taken.union(common))
        return sum(each.num_pages for each in others) + num_more <= NUM_PAGES

    @rule(
        session_id=ids,
        epoch_offset=st.integers(-1, 1),
        client_id=st.sampled_from(CLIENTS),
        position=st.integers(0, 50),
        num_tokens=st.integers(1, 6),
    )
    def step(self, session_id: bytes, epoch_offset: int, client_id: bytes, position: int, num_tokens: int) -> None:
        held, before = self.held(session_id), self.snapshot()
        request = held.request if held else a_request(session_id)
        failure: CorollaError | None = None
        try:
            stepped = step(
                self.table, request, position, num_tokens, self.now_s, epoch=request.epoch + epoch_offset,
                client_id=client_id,
            )  # fmt: skip
        except CorollaError as error:
            failure = error
        if failure is None:
            assert stepped.cache.num_tokens == position + num_tokens
            assert not epoch_offset
            return
        assert self.snapshot() == before
        if (
            held is None
            or held.request.client_id != client_id
            or (held.state is SessionState.ORPHANED and not epoch_offset)
        ):
            assert isinstance(failure, HopSessionLost)
        elif epoch_offset or held.is_idle:
            assert isinstance(failure, StaleEpoch)
        elif position > held.cache.num_tokens:
            assert isinstance(failure, PositionGap)
            assert failure.held == held.cache.num_tokens
        else:
            assert isinstance(failure, OutOfPages)
            num_pages = held.num_pages + held.cache.num_common_pages
            assert position + num_tokens > num_pages * PAGE_TOKENS or position < held.cache.common_end

    @rule(session_id=ids, epoch_offset=st.integers(-1, 1), position=st.integers(0, 60), idle=st.booleans())
    def truncate(self, session_id: bytes, epoch_offset: int, position: int, idle: bool) -> None:
        held, before = self.held(session_id), self.snapshot()
        epoch = (held.request.epoch if held else 1) + epoch_offset
        tokens_before, was_idle = (held.cache.num_tokens, held.is_idle) if held else (0, False)
        self.table.truncate(session_id, epoch, position, idle=idle)
        if held is None or epoch_offset < 0:
            assert self.snapshot() == before
        else:
            assert held.cache.num_tokens == min(position, tokens_before)
            num_pages = held.num_pages + held.cache.num_common_pages
            assert num_pages == self.table.pool.pages_for(held.cache.num_tokens)
            assert held.is_idle == (idle or was_idle), "a turn that is over begins again by an open only"

    @rule(session_id=ids, epoch_offset=st.integers(-1, 1))
    def close(self, session_id: bytes, epoch_offset: int) -> None:
        held, before = self.held(session_id), self.snapshot()
        self.table.end(session_id, (held.request.epoch if held else 1) + epoch_offset)
        if held is None or epoch_offset < 0:
            assert self.snapshot() == before
        else:
            assert self.held(session_id) is None

    @rule(client_id=st.sampled_from(CLIENTS))
    def lose_client(self, client_id: bytes) -> None:
        mine = [held for held in self.table if held.request.client_id == client_id]
        gone = [held.request.session_id for held in mine if held.request.transient]
        assert self.table.end_stream(client_id) == len(gone)
        assert all(self.held(session_id) is None for session_id in gone)
        assert all(held.is_idle for held in mine if not held.request.transient)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        due = [held.request.session_id for held in self.table if held.lease_deadline_s < self.now_s]
        assert self.table.expire(self.now_s) == len(due)
        assert all(self.held(session_id) is None for session_id in due)

    @invariant()
    def pages_add_up(self) -> None:
        pool = self.table.pool
        assert sum(held.num_pages for held in self.table) + pool.num_common + pool.num_available == NUM_PAGES
        for held in self.table:
            num_pages = held.num_pages + held.cache.num_common_pages
            assert num_pages >= pool.pages_for(held.cache.num_tokens)
            assert sum(table.num_pages for table in held.cache.tables) <= num_pages

    @invariant()
    def tables_agree(self) -> None:
        """Leases end when somebody looks, and streams are not told of here."""
        assert not any(check(self.table, BoundaryActivations(0), lambda client_id: {0}, now_s=0.0))

    def teardown(self) -> None:
        self.table.expire(self.now_s + 1000)
        assert self.table.pool.num_available == NUM_PAGES


TestHop = Hop.TestCase
TestHop.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_idle_sessions_are_evicted_least_recently_used_first() -> None:
    table = a_table()
    for number, session_id in enumerate((b"old", b"new", b"busy")):
        step(table, table.open(a_request(session_id, max_tokens=16), number).request, 0, 16, number)
    for session_id in (b"new", b"old"):
        table.truncate(session_id, 1, 16, idle=True)
    table.open(a_request(b"wants", max_tokens=16), 5.0)
    assert [held.request.session_id for held in table] == [b"new", b"busy", b"wants"]
    assert table.num_evicted == 1
    with pytest.raises(OutOfPages):
        table.open(a_request(b"greedy", max_tokens=24), 6.0)
    assert table.num_evicted == 1, "nobody is evicted for what cannot be had anyway"


def test_how_often_an_open_looks_its_text_up_does_not_grow_with_the_sessions_that_it_evicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, text = a_table(), ExpectedText(b"t", HASHES, len(HASHES) * PAGE_TOKENS + 1)
    for number in range(10):
        request = table.open(a_request(bytes([number]), max_tokens=PAGE_TOKENS), 0.0).request
        step(table, request, 0, 1)
        table.truncate(request.session_id, 1, 1, idle=True)
    asked, find = list[PrefixKey](), table.pool.find_prefix
    asked, find = list[PrefixKey](), table.pool.find_prefix

    def counted(key: PrefixKey) -> int | None:
        asked.append(key)
        return find(key)

    monkeypatch.setattr(table.pool, "find_prefix", counted)
    table.open(a_request(text=text, max_tokens=11 * PAGE_TOKENS), 1.0)
    assert (table.num_evicted, len(table)) == (9, 2)
    assert len(asked) <= 4 * len(HASHES)
    table.end(b"s", 1)
    asked.clear()
    table.open(a_request(b"evicts nobody", text=text, max_tokens=PAGE_TOKENS), 2.0)
    assert len(asked) == 1, "it is looked up once"


def test_heartbeats_announce_the_newest_beginnings_that_are_there() -> None:
    table = a_table()
    for number in range(2):
        request = table.open(a_request(bytes([number]), max_tokens=8), 0.0).request
        step(table, request, 0, 8)
        hashes = HASHES[2 * number :][:2]
        named = [pb.Beginning(num_tokens=each, digest=10 * number + each) for each in (3, 4, 8)]
        for epoch in (2, 1):
            assert len(unpack(table.announced.newest_first())) == 2 * number, "only the session's present epoch counts"
            table.set_page_hashes(request.session_id, epoch, hashes, named)
        table.end(request.session_id, 1)
    assert table.announced.newest_first() == pack([18, 14, 8, 4])
    table.open(a_request(b"takes a page", max_tokens=(NUM_PAGES - 3) * PAGE_TOKENS), 1.0)
    assert table.announced.newest_first() == pack([18, 14, 4])


def test_few_beginnings_are_announced_the_newest_first() -> None:
    announced = AnnouncedBeginnings(lambda page: True)
    for digest in range(100):
        announced.note(digest, PrefixKey(b"t", HASHES[0], 0))
        announced.note(0, PrefixKey(b"t", HASHES[0], 0))
        assert unpack(announced.newest_first())[-1] == 0, "it is in use, and what is new comes before it"
    assert announced.newest_first() == pack([*range(99, 100 - MOST_ANNOUNCED, -1), 0])


def test_only_client_services_name_beginnings_and_few_at_a_time() -> None:
    holds = pb.Holds(beginnings=[pb.Beginning(digest=1)] * 4)
    client, library = (Workload.parse(f"spiffe://corolla/{role}/one") for role in ("client", "library"))
    assert named_in(holds, client) == named_in(holds, None) == holds.beginnings
    assert not named_in(holds, library)
    holds.beginnings.add()
    with pytest.raises(MalformedMessage):
        named_in(holds, client)


def test_an_empty_session_gets_pages_that_another_one_holds_in_place_of_its_promise() -> None:
    table, text = a_table(), ExpectedText(b"t", HASHES[:2], 2 * PAGE_TOKENS + 1)
    other = table.open(a_request(b"other", text=text), 0.0).request
    step(table, other, 0, 2 * PAGE_TOKENS)
    table.open(a_request(max_tokens=4 * PAGE_TOKENS), 0.0)
    table.open(a_request(b"rest", max_tokens=(NUM_PAGES - 6) * PAGE_TOKENS), 0.0)
    assert table.pool.num_available == 0
    again = a_request(epoch=2, text=text, write_start=text.num_tokens, max_tokens=4 * PAGE_TOKENS)
    held = table.open(again, 1.0)
    assert (held.cache.num_tokens, held.cache.num_common_pages, held.num_pages) == (2 * PAGE_TOKENS, 2, 2)


def test_a_step_that_is_not_computed_leaves_no_tokens_that_it_takes_back() -> None:
    table, request = a_table(), a_request()
    table.open(request, 0.0)
    step(table, request, 0, 8)
    held = table.for_step(b"s", 1, request.client_id, 5, 1, request.blocks, 0.0, step_id=7)
    assert (held.cache.num_tokens, held.applied_step_id) == (5, 7)


def test_a_turn_whose_client_died_keeps_the_pages_of_its_tokens_only() -> None:
    table = a_table()
    step(table, table.open(a_request(b"turn", max_tokens=32), 0.0).request, 0, 4)
    assert table.end_stream(CLIENTS[0]) == 0
    (held,) = table
    assert (held.is_idle, held.cache.num_tokens, held.num_pages) == (True, 4, 1)
    table.open(a_request(b"next", client_id=CLIENTS[1], max_tokens=40), 1.0)
    assert table.num_evicted == 0
    assert table.open(a_request(b"turn", epoch=2, client_id=CLIENTS[1], max_tokens=8), 2.0).cache.num_tokens == 4


def test_a_step_after_a_broken_stream_is_refused_until_the_session_is_opened_again() -> None:
    """A stale epoch would look like a turn that another client service has begun."""
    table = a_table()
    request = table.open(a_request(b"turn", max_tokens=32), 0.0).request
    step(table, request, 0, 4)
    table.end_stream(CLIENTS[0])
    with pytest.raises(HopSessionLost):
        step(table, request, 4, 1)
    reopened = table.open(replace(request, epoch=2), 1.0)
    with pytest.raises(StaleEpoch):
        step(table, request, 4, 1)
    assert step(table, reopened.request, 4, 1).cache.num_tokens == 5


def test_a_session_that_arrives_while_its_client_dies_is_still_filled() -> None:
    table = a_table()
    held = table.receive(a_request(b"moves", max_tokens=32), b"h" * 16, 0.0)
    table.end_stream(CLIENTS[0])
    assert held.num_pages == 8
    table.arrived(held, is_idle=True)
    assert held.num_pages == 0


def test_an_incomplete_session_is_neither_evicted_nor_handed_over_when_its_client_dies() -> None:
    table = a_table()
    held = table.receive(a_request(b"moves", max_tokens=32), TRANSFER, 0.0)
    table.end_stream(CLIENTS[0])
    with pytest.raises(OutOfPages):
        table.open(a_request(b"wants", max_tokens=40), 1.0)
    table.truncate(b"moves", 1, 0, idle=True)
    assert (held.is_idle, held.is_unclaimed) == (False, True)


def test_a_step_that_comes_after_the_turn_does_not_wake_the_session() -> None:
    table = a_table()
    request = table.open(a_request(), 0.0).request
    step(table, request, 0, 4)
    table.truncate(b"s", 1, 2, idle=True)
    with pytest.raises(StaleEpoch):
        step(table, request, 2, 1)
    (held,) = table
    assert (held.is_idle, held.cache.num_tokens, held.num_pages) == (True, 2, 1)
    reopened = table.open(a_request(epoch=2), 1.0)
    assert reopened.cache.num_tokens == 2
    assert step(table, reopened.request, 2, 1).cache.num_tokens == 3


def test_a_step_comes_once_and_in_order() -> None:
    table, request = a_table(), a_request()
    table.open(request, 0.0)

    def is_new(step_id: int, epoch: int = 1, client_id: bytes = CLIENTS[0]) -> bool:
        return table.note_step(request.session_id, epoch, client_id, step_id)

    assert [is_new(step_id) for step_id in (3, 3, 2, 4, 3)] == [True, False, False, True, False]
    # A step that `for_step` refuses does not count as a copy, and leaves the session's own steps alone.
    assert [is_new(9, epoch=2), is_new(9, client_id=CLIENTS[1]), is_new(5)] == [True, True, True]
    table.open(replace(request, epoch=2), 0.0)
    assert [is_new(step_id, epoch=2) for step_id in (5, 6, 6)] == [False, True, False]
    table.open(replace(request, epoch=3, client_id=CLIENTS[1]), 0.0)
    assert [is_new(1, epoch=3, client_id=CLIENTS[1]) for _ in range(2)] == [True, False]
    assert table.note_step(b"unknown", 1, CLIENTS[0], 1)


def test_a_turn_that_ended_in_the_midst_of_a_recovery_is_over() -> None:
    table = a_table()
    step(table, table.open(a_request(max_tokens=32), 0.0).request, 0, 4)
    table.truncate(b"s", 3, 2, idle=True)
    (held,) = table
    assert (held.is_idle, held.cache.num_tokens, held.num_pages) == (True, 2, 1)
    table.open(a_request(b"wants", max_tokens=NUM_PAGES * PAGE_TOKENS), 1.0)
    assert table.num_evicted == 1


def test_an_open_that_was_taken_back_may_be_repeated_by_its_client_only() -> None:
    table = a_table()
    table.open(a_request(), 0.0)
    with pytest.raises(StaleEpoch):
        table.open(a_request(), 0.0)
    table.truncate(b"s", 1, 2**31, idle=True)
    with pytest.raises(StaleEpoch):
        table.open(a_request(client_id=CLIENTS[1]), 0.0)
    assert not table.open(a_request(), 0.0).is_idle


def test_a_session_of_a_broken_stream_may_be_opened_again_on_the_next_one() -> None:
    table = a_table()
    table.open(a_request(stream=1), 0.0)
    for again in (a_request(stream=1), a_request(client_id=CLIENTS[1], stream=2)):
        with pytest.raises(StaleEpoch):
            table.open(again, 0.0)
    assert table.open(a_request(stream=2), 0.0).request.stream == 2


def test_a_session_that_was_handed_over_may_be_opened_by_its_client() -> None:
    table = a_table()
    held = table.receive(a_request(), b"t" * 16, 0.0)
    table.arrived(held, is_idle=False)
    with pytest.raises(StaleEpoch):
        table.open(a_request(client_id=CLIENTS[1], stream=2), 0.0)
    assert table.open(a_request(stream=1), 0.0).state is SessionState.RUNNING
    with pytest.raises(StaleEpoch):
        table.open(a_request(stream=1), 0.0)


def test_steps_keep_the_lease() -> None:
    table = a_table()
    request = table.open(a_request(lease_s=10.0), 0.0).request
    step(table, request, 0, 1, now_s=9.0)
    assert table.expire(18.0) == 0
    assert table.expire(19.5) == 1
    assert len(table) == 0
    with pytest.raises(HopSessionLost):
        step(table, request, 1, 1, now_s=20.0)


def some_prompts(num_tokens: int = 2) -> BlockPrompts:
    return BlockPrompts(torch.ones(2, num_tokens, 4))


def test_prompts_are_copied_and_go_with_their_session() -> None:
    table = a_table(max_prompt_bytes=2 * some_prompts().nbytes)
    given = some_prompts()
    held = table.open(a_request(prompts=given), 0.0)
    assert held.request.prompts is not None
    given.values.zero_()
    assert held.request.prompts.values.all()
    table.open(a_request(b"t", prompts=some_prompts()), 0.0)
    with pytest.raises(OutOfPages, match="prompts"):
        table.open(a_request(b"u", prompts=some_prompts(1)), 0.0)
    with pytest.raises(OutOfPages, match="prompts"):
        table.open(a_request(b"t", epoch=2, prompts=some_prompts(3)), 0.0)
    assert len(table) == 2
    table.open(a_request(b"t", epoch=2, prompts=some_prompts()), 0.0)
    table.end(b"s", 1)
    table.open(a_request(b"u", prompts=some_prompts(1)), 0.0)


@pytest.mark.parametrize("had, has", [(None, None), (some_prompts(), some_prompts(1)), (some_prompts(), None),
                                      (None, some_prompts())])  # fmt: skip
def test_sessions_with_and_without_prompts_share_no_tokens(had: BlockPrompts | None, has: BlockPrompts | None) -> None:
    table = a_table(max_prompt_bytes=1 << 10)
    request = a_request(prompts=had)
    table.open(request, 0.0)
    step(table, request, 0, 5)
    is_kept = (had is None) == (has is None)
    table.open(a_request(b"t", prompts=has), 0.0)
    if is_kept:
        twin = table.fork(b"s", b"t", CLIENTS[0], BLOCKS[0])
        assert twin.num_tokens == 5
        twin.clear()
    else:
        with pytest.raises(HopSessionLost, match="prompts"):
            table.fork(b"s", b"t", CLIENTS[0], BLOCKS[0])
    assert table.open(a_request(epoch=2, prompts=has), 0.0).cache.num_tokens == (5 if is_kept else 0)


# --- handed over by another server ----------------------------------------------------------------------------------

TRANSFER = b"x" * 16


def test_an_arriving_session_is_usable_only_when_complete_and_only_by_its_own_client() -> None:
    table = a_table()
    request = a_request(epoch=3)
    held = table.receive(replace(request, resume=False), TRANSFER, 0.0)
    assert table.get_arriving(b"s", 3, TRANSFER, 1.0) is held
    for epoch, transfer_id in ((3, b"y" * 16), (3, b""), (2, TRANSFER), (4, TRANSFER)):
        with pytest.raises(HopSessionLost):
            table.get_arriving(b"s", epoch, transfer_id, 1.0)
    with pytest.raises(StaleEpoch):
        step(table, request, 0, 1)
    held.cache.make_writable(0, 6)
    held.cache.commit(6)
    table.arrived(held, is_idle=False)
    with pytest.raises(HopSessionLost):
        table.get_arriving(b"s", 3, TRANSFER, 1.0)
    with pytest.raises(HopSessionLost):
        table.open(a_request(epoch=4, tenant="u"), 2.0)
    assert table.open(a_request(epoch=4), 2.0).cache.num_tokens == 6


def test_an_incomplete_arrival_is_discarded_when_its_session_is_opened() -> None:
    table = a_table()
    held = table.receive(a_request(epoch=3, resume=False), TRANSFER, 0.0)
    held.cache.make_writable(0, 6)
    held.cache.commit(6)
    assert table.open(a_request(epoch=4), 1.0).cache.num_tokens == 0


def test_an_offer_goes_on_with_the_same_handover_and_begins_anew_with_another() -> None:
    table = a_table()
    request = a_request(epoch=3, resume=False)
    for transfer_id, num_kept in ((TRANSFER, 0), (TRANSFER, 6), (b"y" * 16, 0)):
        held = table.receive(request, transfer_id, 0.0)
        assert held.cache.num_tokens == num_kept
        held.cache.make_writable(0, 6)
        held.cache.commit(6)


def test_a_session_that_moves_holds_in_common_what_others_hold() -> None:
    table, salt = a_table(), b"salt"
    shared = ExpectedText(salt, HASHES[:4], 17)
    held = table.open(a_request(text=shared, max_tokens=20, write_start=17), 0.0)
    step(table, held.request, 0, 17)
    text = ExpectedText(salt, HASHES[:6], 27)
    offer = a_request(b"moves", text=text, resume=False, max_tokens=40, write_start=27)
    moved = table.receive(offer, TRANSFER, 0.0)
    assert (moved.cache.num_tokens, moved.cache.common_end, moved.num_pages) == (16, 16, 10 - 4)
    assert held.cache.last_common_page == PrefixKey(salt, HASHES[3], 0)
    assert moved.cache.last_common_page is None, "its text is not known until its client opens it here"
    moved.cache.make_writable(16, 11)
    moved.cache.commit(27)
    assert moved.cache.pool.find_prefix(PrefixKey(salt, HASHES[4], 0)) is None, "another server has computed it"
    table.arrived(moved, is_idle=False)
    table.open(replace(offer, resume=True, epoch=2), 0.0)
    step(table, replace(offer, epoch=2), 27, 1)
    assert moved.cache.pool.find_prefix(PrefixKey(salt, HASHES[5], 0)) is not None
    assert (moved.cache.common_end, moved.num_pages) == (24, 10 - 6)
    assert moved.cache.last_common_page == PrefixKey(salt, HASHES[5], 0)


def test_no_handover_touches_a_session_that_its_client_has_open() -> None:
    table = a_table()
    held = table.open(a_request(epoch=3), 0.0)
    step(table, held.request, 0, 5)
    with pytest.raises(StaleEpoch):
        table.receive(a_request(epoch=3, resume=False), TRANSFER, 1.0)
    with pytest.raises(HopSessionLost):
        table.receive(a_request(epoch=9, tenant="u", resume=False), TRANSFER, 1.0)
    assert held.cache.num_tokens == 5


@pytest.mark.parametrize("state", ["open", "idle", "handed over", "handed over, idle"])
def test_a_server_takes_no_second_run_of_blocks_of_a_session(state: str) -> None:
    """A hop that leaves may find that a later hop of the same chain has its blocks, too."""
    table = a_table()
    request = a_request(epoch=3, resume=False)
    if "handed over" in state:
        held = table.receive(request, TRANSFER, 0.0)
        table.arrived(held, is_idle="idle" in state)
    else:
        held = table.open(request, 0.0)
        if "idle" in state:
            table.truncate(b"s", 3, 0, idle=True)
    held.cache.make_writable(0, 5)
    held.cache.commit(5)
    with pytest.raises(StaleEpoch):
        table.receive(replace(request, blocks=BLOCKS[1]), b"y" * 16, 1.0)
    assert table.get(b"s") is held
    assert held.cache.num_tokens == 5
    # Tokens that are left there from an earlier time belong to no session any more.
    assert table.receive(replace(request, epoch=4, blocks=BLOCKS[1]), TRANSFER, 1.0).cache.num_tokens == 0


def test_parts_may_be_written_during_an_iteration_over_the_sessions() -> None:
    """They are written in another thread than that which counts the sessions."""
    table = a_table()
    table.receive(a_request(epoch=3, resume=False), TRANSFER, 0.0)
    table.open(a_request(b"t"), 0.0)
    looking = iter(table)
    next(looking)
    table.get_arriving(b"s", 3, TRANSFER, 1.0)
    assert len([*looking]) == 1


def test_the_tokens_of_sessions_in_mid_answer_are_counted() -> None:
    table, parked = a_table(), a_request(b"parked")
    for request, num_tokens in ((a_request(), 5), (parked, 3)):
        table.open(request, 0.0)
        step(table, request, 0, num_tokens)
    assert table.num_running_tokens == 8
    table.truncate(parked.session_id, parked.epoch, 3, idle=True)
    assert table.num_running_tokens == 5


@pytest.mark.parametrize("is_whole", [True, False])
def test_pages_of_an_unclaimed_session_are_freed_long_before_its_lease_ends(is_whole: bool) -> None:
    table = a_table()
    held = table.receive(a_request(lease_s=3600.0), TRANSFER, 0.0)
    if is_whole:
        table.arrived(held, is_idle=False)
    assert table.expire(UNCLAIMED_LEASE_S) == 0
    assert table.expire(UNCLAIMED_LEASE_S + 1) == 1
    assert table.num_available_pages == NUM_PAGES
    # Between two turns it waits as long as where it came from.
    table.arrived(table.receive(a_request(lease_s=3600.0), TRANSFER, 0.0), is_idle=True)
    assert table.expire(3599.0) == 0


def test_a_draining_server_opens_no_session_and_keeps_its_own_until_they_have_moved() -> None:
    table = a_table()
    held = table.open(a_request(), 0.0)
    table.is_draining = True
    with pytest.raises(HopLeaving):
        table.open(a_request(b"new"), 0.0)
    with pytest.raises(HopLeaving):
        table.receive(a_request(b"new"), TRANSFER, 0.0)
    reopened = table.open(a_request(epoch=2), 0.0)
    step(table, reopened.request, 0, 1)
    held.apply(SessionEvent.LAST_PART_READ)
    with pytest.raises(HopLeaving):
        step(table, reopened.request, 1, 1)
    with pytest.raises(HopLeaving):
        table.open(a_request(epoch=3), 0.0)


def a_standby(table: SessionTable[SessionPages], num_tokens: int, **changes: Any) -> HopSession[SessionPages]:
    """A standby that another hop has filled."""
    held = table.open_standby(a_request(standby_transfer_id=TRANSFER, transient=True, **changes), 0.0)
    start = held.cache.num_tokens
    table.grow_standby(held, start, num_tokens)
    held.cache.make_writable(start, num_tokens - start)
    held.cache.commit(num_tokens)
    return held


def test_a_standby_keeps_what_it_got_and_reserves_nothing_ahead() -> None:
    table = a_table()
    held = a_standby(table, 6, max_tokens=32)
    assert held.num_pages == table.pool.pages_for(6)
    with pytest.raises(StaleEpoch):
        step(table, held.request, 6, 1)
    with pytest.raises(HopSessionLost):
        table.get_arriving(b"s", 1, b"y" * 16, 1.0)
    assert table.get_arriving(b"s", 1, TRANSFER, 1.0) is held
    again = table.open_standby(a_request(epoch=2, standby_transfer_id=b"y" * 16), 1.0)
    assert (again, again.cache.num_tokens) == (held, 6)
    with pytest.raises(HopSessionLost):
        table.get_arriving(b"s", 2, TRANSFER, 1.0)
    assert table.open(a_request(epoch=3, max_tokens=32), 2.0).cache.num_tokens == table.num_standby_tokens == 6
    assert held.state is SessionState.RUNNING


def test_a_standby_goes_before_any_conversation() -> None:
    table = a_table()
    request = table.open(a_request(b"talk", max_tokens=PAGE_TOKENS), 0.0).request
    step(table, request, 0, 1)
    table.truncate(b"talk", 1, 1, idle=True)
    a_standby(table, PAGE_TOKENS)
    table.open(a_request(b"new", max_tokens=(NUM_PAGES - 1) * PAGE_TOKENS), 1.0)
    assert table.get(b"s") is None
    assert table.get(b"talk") is not None


def test_standbys_hold_what_they_find_in_common_with_sessions() -> None:
    table, text = a_table(), ExpectedText(b"t", HASHES[:4], 4 * PAGE_TOKENS + 1)
    first = table.open(a_request(text=text, write_start=text.num_tokens, max_tokens=16), 0.0)
    step(table, first.request, 0, 16)
    for name in (b"1", b"2", b"3", b"4"):
        held = a_standby(table, 20, session_id=name, max_tokens=32, text=text)
        assert (held.cache.num_tokens, held.num_pages) == (20, 1)
    table.open(a_request(b"busy"), 0.0)
    assert table.pool.num_available == NUM_PAGES - 4 - 4 - 2
    with pytest.raises(OutOfPages):
        table.grow_standby(held, 2, 20)
    table.end(b"1", 1)
    table.grow_standby(held, 9, 20)
    assert (held.num_pages, held.cache.common_end) == (3, 8)


def test_standbys_take_half_of_the_pages_together() -> None:
    table = a_table()
    half = NUM_PAGES // 2
    first, second = (a_standby(table, PAGE_TOKENS, session_id=name, max_tokens=64) for name in (b"1", b"2"))
    with pytest.raises(OutOfPages):
        table.grow_standby(second, PAGE_TOKENS, half * PAGE_TOKENS)
    table.grow_standby(second, PAGE_TOKENS, (half - 1) * PAGE_TOKENS)
    assert (first.num_pages, second.num_pages) == (1, half - 1)


def test_a_session_that_only_reads_evicts_nobody_for_what_is_not_here() -> None:
    table, text = a_table(), ExpectedText(b"t", HASHES, 6 * PAGE_TOKENS + 1)
    first = table.open(a_request(b"f", text=text), 0.0)
    step(table, first.request, 0, 8)
    table.end(b"f", 1)
    idle = a_request(b"idle", max_tokens=(NUM_PAGES - 2) * PAGE_TOKENS)
    table.open(idle, 0.0)
    step(table, idle, 0, idle.max_tokens)
    table.truncate(b"idle", 1, idle.max_tokens, idle=True)
    asked = a_request(text=text, max_tokens=text.num_tokens, write_start=text.num_tokens, only_cached=True)
    held = table.open(asked, 0.0)
    assert (held.cache.num_tokens, held.num_settled_tokens, table.num_evicted) == (8, 8, 0)
    with pytest.raises(OutOfPages):
        step(table, asked, 8, 1)
    assert table.open(replace(asked, session_id=b"g", text=None, write_start=0), 0.0).num_pages == 0
    table.open(replace(asked, session_id=b"h", only_cached=False), 0.0)
    assert table.num_evicted == 1


@pytest.mark.parametrize("unsent, num_tokens", [(0, 12), (4, 12), (10, 0), (20, 0)])
def test_a_standby_without_what_a_window_sees_holds_nothing(unsent: int, num_tokens: int) -> None:
    pool = PagePool(16, PAGE_TOKENS)
    table = SessionTable(pool, lambda: SessionPages(pool, [GroupRule(), GroupRule(window=6)]))
    held = a_standby(table, 12, max_tokens=32)
    held.unsent_before[1] = unsent
    assert table.open(a_request(epoch=2, max_tokens=32), 1.0).cache.num_tokens == num_tokens


def test_what_the_prefix_cache_has_of_a_text_is_settled() -> None:
    """What a session held before it was opened again is not: its answer may drop some of it."""
    table, text = a_table(), ExpectedText(b"salt", (b"1" * 16, b"2" * 16), 2 * PAGE_TOKENS)
    first = a_request(b"f", text=text)
    table.open(first, 0.0)
    step(table, first, 0, 2 * PAGE_TOKENS)
    table.end(b"f", 1)
    held = table.open(a_request(text=text), 0.0)
    assert (held.cache.num_tokens, held.num_settled_tokens) == (PAGE_TOKENS, PAGE_TOKENS)
    again = table.open(a_request(epoch=2, text=text), 0.0)
    assert (again.cache.num_tokens, again.num_settled_tokens) == (PAGE_TOKENS, 0)
