"""Each row of the table of a session's states, by real events; all other transitions raise."""

from collections.abc import Callable
from itertools import product

import pytest

from corolla.block_server.hop_session import TRANSITIONS, ForbiddenTransition, HopSession, SessionEvent, SessionState
from corolla.block_server.sessions import SessionTable
from corolla.cache.pages import PagePool
from corolla.cache.session_pages import SessionPages
from corolla.cache.tables import GroupRule
from corolla.chassis.errors import HopSessionLost
from tests.unit.block_server.test_sessions import CLIENTS, TRANSFER, a_request, a_table, step

S, E = SessionState, SessionEvent
Table = SessionTable[SessionPages]

WAYS: dict[SessionState, tuple[SessionEvent, ...]] = {
    S.NEW: (), S.ARRIVING: (E.OFFERED,), S.UNCLAIMED: (E.OFFERED, E.ARRIVED), S.RUNNING: (E.OPENED,),
    S.PARKED: (E.OPENED, E.TURN_ENDED), S.ORPHANED: (E.OPENED, E.STREAM_ENDED), S.LEAVING: (E.OPENED, E.LAST_PART_READ),
    S.LEAVING_PARKED: (E.OPENED, E.TURN_ENDED, E.LAST_PART_READ), S.GONE: (E.OPENED, E.FREED),
    S.STANDBY: (E.NAMED_STANDBY,),
}  # fmt: skip
"""How a session gets into each state."""


def happen(table: Table, event: SessionEvent) -> None:
    """Has an event happen as the servers and clients around bring it about."""
    held = table.get(b"s")
    epoch = held.request.epoch if held is not None else 0
    match event:
        case E.OPENED:
            table.open(a_request(epoch=epoch + 1), 0.0)
        case E.NAMED_STANDBY:
            table.open_standby(a_request(epoch=epoch + 1, standby_transfer_id=TRANSFER), 0.0)
        case E.OFFERED:
            table.receive(a_request(epoch=epoch + 1, resume=False), TRANSFER, 0.0)
        case E.TURN_ENDED:
            table.truncate(b"s", epoch, 2**31, idle=True)
        case E.STREAM_ENDED:
            table.end_stream(CLIENTS[0])
        case E.FREED:
            table.end(b"s", epoch)
        case _:
            assert held is not None
            happening: dict[SessionEvent, Callable[[], None]] = {
                E.ARRIVED: lambda: table.arrived(held, is_idle=False),
                E.ARRIVED_PARKED: lambda: table.arrived(held, is_idle=True),
                E.LAST_PART_READ: lambda: held.apply(E.LAST_PART_READ),
                E.STAYS: lambda: table.cancel_leaving(b"s", held.version),
            }
            happening[event]()


@pytest.mark.parametrize(
    "state, event", [(state, event) for state, events in TRANSITIONS.items() for event in events], ids=lambda x: x.value
)
def test_allowed_transitions_change_the_state(state: SessionState, event: SessionEvent) -> None:
    table = a_table()
    for each in WAYS[state]:
        happen(table, each)
    held = table.get(b"s")
    assert held is None or held.state is state
    happen(table, event)
    after = table.get(b"s")
    if TRANSITIONS[state][event] is S.GONE:
        assert after is None
        assert held is not None
        assert held.state is S.GONE
    else:
        assert after is not None
        assert after.state is TRANSITIONS[state][event]


@pytest.mark.parametrize(
    "state, event",
    [(state, event) for state, event in product(S, E) if event not in TRANSITIONS[state]],
    ids=lambda x: x.value,
)
def test_forbidden_transitions_raise_and_change_nothing(state: SessionState, event: SessionEvent) -> None:
    pool = PagePool(1, 1)
    held = HopSession(a_request(), SessionPages(pool, [GroupRule()]))
    for each in WAYS[state]:
        held.apply(each)
    assert held.state is state
    with pytest.raises(ForbiddenTransition, match=event.value):
        held.apply(event)
    assert held.state is state


def test_an_older_version_does_not_change_a_session() -> None:
    """Nor does that of another one which had the same name."""
    table = a_table()
    versions = [table.open(a_request(), 0.0).version]
    versions.append(table.open(a_request(epoch=2), 0.0).version)
    table.end(b"s", 2)
    held = table.open(a_request(), 0.0)
    held.apply(E.LAST_PART_READ)
    for version in versions:
        assert version != held.version
        with pytest.raises(HopSessionLost):
            table.in_version(b"s", version)
        table.cancel_leaving(b"s", version)
        assert held.state is S.LEAVING
    assert table.in_version(b"s", held.version) is held
    table.cancel_leaving(b"s", held.version)
    assert held.state is S.RUNNING


def test_a_parked_session_must_be_opened_again_after_a_failed_handover() -> None:
    """Its client's stream may have ended meanwhile."""
    table = a_table()
    held = table.open(a_request(), 0.0)
    table.end_stream(CLIENTS[0])
    held.apply(E.LAST_PART_READ)
    table.cancel_leaving(b"s", held.version)
    with pytest.raises(HopSessionLost):
        step(table, held.request, 0, 1)
