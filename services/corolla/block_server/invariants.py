"""The invariants between the tables of a block server, and the check that they hold. Pure.

Each table keeps its own counts. If two counts differ, something leaks or is used twice, and no other check finds out
before pages run out or an answer is wrong. So the counts are compared while nothing runs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import repeat
from operator import ne
from typing import Any, Final, Literal, get_args

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.hop_session import HopSession, SessionState
from corolla.block_server.sessions import SessionTable

Invariant = Literal["pages", "promises", "sessions", "owners", "leases", "outputs", "handovers"]
INVARIANTS: Final[tuple[Invariant, ...]] = get_args(Invariant)

PAGES_PER_PART: Final = 1024

_STREAMING: Final = (SessionState.RUNNING, SessionState.LEAVING)


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold. `text` contains only numbers, and no session id."""

    invariant: Invariant
    text: str


def check(
    sessions: SessionTable[Any], outputs: BoundaryActivations, streams: Callable[[bytes], Collection[int]], now_s: float
) -> Iterator[list[Violation]]:
    """Checks the invariants in parts that take a fraction of a millisecond each, and yields each part's violations.

    Resume the iterator only while nothing is computed or copied and no table is being changed. The tables may change
    between two parts, because a part depends on no other part: it compares sums, or checks one session. Only the
    comparison of the pages' holders takes several parts; it ends without a result if the pool has changed since it
    began.

    Args:
        streams: returns the numbers of the streams that a client has to this server.
        now_s: a time on the clock of the leases; sessions whose leases ended before it must have been freed already.
    """
    yield [*_sums(sessions, outputs)]
    for session in tuple(sessions):
        is_held = sessions.get(session.request.session_id) is session
        if is_held or session.state is not SessionState.GONE:
            yield [*_session(session, streams, now_s, is_held=is_held)]
    for num_wrong in _wrong_holders(sessions):
        text = f"for {num_wrong} pages, the pool counts another number of holders than the sessions"
        yield [Violation("pages", text)] if num_wrong else []


def _sums(sessions: SessionTable[Any], outputs: BoundaryActivations) -> Iterator[Violation]:
    pool = sessions.pool
    tables = [table for session in sessions for table in session.cache.tables]
    states = {"used": pool.num_used, "cached": pool.num_cached, "unused": pool.num_unused}
    if sum(states.values()) != pool.num_pages or pool.num_used != pool.num_pages - pool.holders.count(0):
        yield Violation("pages", f"{states} do not add up to {pool.num_pages}")
    num_promised = sum(session.cache.num_pages for session in sessions)
    num_counted = pool.num_pages - pool.num_available - pool.num_common
    if num_promised != num_counted:
        yield Violation("promises", f"{num_counted} pages are promised, {num_promised} to sessions")
    num_common = len({page for table in tables for page in table.pages[: table.num_common]})
    if num_common != pool.num_common:
        yield Violation("promises", f"{num_common} pages are held in common where {pool.num_common} are counted")
    charged = {page for table in tables if table.account is not None for page in table.pages[: table.num_common]}
    if len(charged) != pool.num_charged.total():
        yield Violation("promises", f"{len(charged)} pages are charged where {pool.num_charged.total()} are counted")
    # Pages that stand for recurrent states, not for tokens, are promised but never held.
    if pool.num_used > sum(table.num_promised for table in tables) + num_common or pool.num_cached > pool.num_available:
        yield Violation("promises", "more pages are used than are promised, or more are cached than are available")
    if any(table.num_pages > table.num_common + table.num_promised for table in tables):
        yield Violation("promises", "a session holds more pages than it was promised")
    num_without = sum(1 for session_id in outputs if sessions.get(session_id) is None)
    if num_without:
        yield Violation("outputs", f"outputs are kept for {num_without} sessions that are not held")
    num_bytes = sum(map(outputs.num_bytes, outputs))
    if outputs.nbytes != num_bytes:
        yield Violation("outputs", f"the outputs have {num_bytes} bytes, but {outputs.nbytes} are counted")


def _session(
    session: HopSession[Any],
    streams: Callable[[bytes], Collection[int]],
    now_s: float,
    *,
    is_held: bool,
) -> Iterator[Violation]:
    cache, request, state = session.cache, session.request, session.state
    if not is_held or state in (SessionState.NEW, SessionState.GONE):
        yield Violation("sessions", f"a session that is {state.value} is held, or is held under another id")
    if cache.num_tokens > cache.num_reserved_tokens:
        yield Violation(
            "sessions", f"{cache.num_tokens} tokens are held where {cache.num_reserved_tokens} are reserved"
        )
    page_tokens = cache.pool.page_tokens
    if any(table.first_token + table.num_pages * page_tokens < cache.num_tokens for table in cache.tables):
        yield Violation("sessions", "a session has fewer pages than its tokens take")
    if state is SessionState.ARRIVING and not session.transfer_id:
        yield Violation("handovers", "a session that arrives has no handover")
    if state in _STREAMING and request.stream not in streams(request.client_id):
        yield Violation("owners", f"a session that is {state.value} was opened on a stream that has ended")
    if session.lease_deadline_s < now_s:
        yield Violation("leases", "a session outlived its lease")


def _wrong_holders(sessions: SessionTable[Any]) -> Iterator[int]:
    """Counts the holders of each page, and yields for how many pages the pool counts another number, in parts.

    The parts that only count yield 0.
    """
    pool = sessions.pool
    version = pool.version
    holders: Counter[int] = Counter()
    for table in [table for session in sessions for table in session.cache.tables]:
        for start in range(0, table.num_pages, PAGES_PER_PART):
            holders.update(table.pages[start : start + PAGES_PER_PART])
            yield 0
            if pool.version != version:
                return
    for start in range(0, pool.num_pages, PAGES_PER_PART):
        part = pool.holders[start : start + PAGES_PER_PART]
        yield sum(map(ne, part, map(holders.get, range(start, start + len(part)), repeat(0))))
        if pool.version != version:
            return
