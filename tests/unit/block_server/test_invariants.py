"""The check names the invariant that each mistake violates."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import OpenRequest
from corolla.block_server.invariants import INVARIANTS, PAGES_PER_PART, Invariant, Violation, check
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from corolla.wire.span import Span

REQUEST = OpenRequest(
    session_id=b"s", epoch=1, tenant="t", client_id=b"c", resume=True, max_tokens=30, blocks=Span(0, 2), lease_s=10.0,
    transient=False, stream=7,
)  # fmt: skip


class Server:
    """A session in mid-answer, a parked one, one that arrives, and boundary activations."""

    def __init__(self) -> None:
        self.pool = PagePool(38, 4)
        self.outputs = BoundaryActivations(1000)
        self.sessions = SessionTable(
            self.pool, lambda: SessionPages(self.pool, [GroupRule(), GroupRule(6, 4)], 2), on_forget=self.outputs.forget
        )
        self.streams = {b"c": {7}}
        for name in (b"s", b"p"):
            held = self.sessions.open(replace(REQUEST, session_id=name), 0.0)
            for position in range(0, 12, 4):
                held.cache.make_writable(position, 4)
                held.cache.commit(position + 4)
            self.outputs.append(name, 0, 12, bytes(120))
        self.sessions.truncate(b"p", 1, 12, idle=True)
        self.arriving = self.sessions.receive(
            replace(REQUEST, session_id=b"a", stream=0, max_tokens=8), b"transfer", 0.0
        )

    def violated(self, now_s: float = 1.0) -> set[Invariant]:
        return {violation.invariant for part in self.check(now_s) for violation in part}

    def check(self, now_s: float = 1.0) -> Iterator[list[Violation]]:
        return check(self.sessions, self.outputs, lambda client: self.streams.get(client, ()), now_s)


def leak_a_page(server: Server) -> None:
    server.pool.allocate(1)


def share_a_page_with_nobody(server: Server) -> None:
    server.pool.share(next(iter(server.sessions)).cache.tables[0].pages[:1])


def promise_to_nobody(server: Server) -> None:
    server.pool.promise(1)


def forget_to_say_how_many_tokens(server: Server) -> None:
    next(iter(server.sessions)).cache.num_tokens = 31


def close_without_freeing(server: Server) -> None:
    next(iter(server.sessions)).cache.clear()
    next(iter(server.sessions)).cache.num_tokens = 12


def lose_a_stream(server: Server) -> None:
    server.streams.clear()


def keep_the_outputs_of_nobody(server: Server) -> None:
    server.outputs.append(b"x", 0, 1, bytes(10))


def miscount_outputs(server: Server) -> None:
    server.outputs.nbytes += 1


def keep_a_row_too_many(server: Server) -> None:
    server.outputs.append(b"s", 12, 3, bytes(31))


def arrive_by_no_handover(server: Server) -> None:
    server.arriving.transfer_id = b""


@pytest.mark.parametrize(
    "mistake, violated",
    [
        (leak_a_page, {"pages", "promises"}), (share_a_page_with_nobody, {"pages"}), (promise_to_nobody, {"promises"}),
        (forget_to_say_how_many_tokens, {"sessions"}), (close_without_freeing, {"sessions"}),
        (lose_a_stream, {"owners"}), (keep_the_outputs_of_nobody, {"outputs"}), (miscount_outputs, {"outputs"}),
        (keep_a_row_too_many, {"outputs"}), (arrive_by_no_handover, {"handovers"}),
    ],
)  # fmt: skip
def test_each_mistake_violates_its_invariant(mistake: Callable[[Server], None], violated: set[Invariant]) -> None:
    server = Server()
    assert server.violated() == set()
    mistake(server)
    assert server.violated() == violated


def test_an_expired_lease_that_was_not_ended_is_found() -> None:
    server = Server()
    assert server.violated(now_s=100.0) == {"leases"}
    server.sessions.expire(100.0)
    assert server.violated(now_s=100.0) == set()
    assert server.pool.num_available == server.pool.num_pages


def free_a_session(server: Server) -> None:
    server.sessions.end(b"s", 1)


def add_a_session(server: Server) -> None:
    server.sessions.open(replace(REQUEST, session_id=b"n", max_tokens=4), 0.0)


def end_a_turn(server: Server) -> None:
    server.sessions.truncate(b"s", 1, 4, idle=True)


def end_a_stream(server: Server) -> None:
    server.streams.clear()
    server.sessions.end_stream(b"c")


def compute_a_step(server: Server) -> None:
    session = server.sessions.for_step(b"s", 1, b"c", 12, 4, REQUEST.blocks, 0.0)
    session.cache.make_writable(12, 4)
    session.cache.commit(16)
    server.outputs.append(b"s", 12, 4, bytes(40))


@pytest.mark.parametrize("change", [free_a_session, add_a_session, end_a_turn, end_a_stream, compute_a_step])
def test_a_change_between_two_slices_is_no_violation(change: Callable[[Server], None]) -> None:
    num_parts = len(list(Server().check()))
    assert num_parts > 5
    for num_before in range(num_parts):
        server = Server()
        parts = server.check()
        for _ in range(num_before):
            assert next(parts) == []
        change(server)
        assert not any(parts)
        assert server.violated() == set()


def test_a_large_pool_is_checked_in_parts_and_its_last_page_too() -> None:
    server = Server()
    server.pool = PagePool(2 * PAGES_PER_PART + 1, 4)
    server.sessions = SessionTable(
        server.pool, lambda: SessionPages(server.pool, [GroupRule()]), on_forget=server.outputs.forget
    )
    session = server.sessions.open(replace(REQUEST, max_tokens=4 * server.pool.num_pages), 0.0)
    server.outputs.forget(b"p")
    # The sums, the session, its pages in three parts, and those of the pool in three.
    assert [*server.check()] == [[]] * 8
    last_page = server.pool.num_pages - 1
    assert session.cache.tables[0].pages[-1] == last_page
    server.pool.share([last_page])
    assert server.violated() == {"pages"}


def test_every_invariant_has_a_mistake_in_this_module() -> None:
    assert set(INVARIANTS) == {"pages", "promises", "sessions", "owners", "leases", "outputs", "handovers"}
