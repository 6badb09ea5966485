"""The simulation notices violations."""

from unittest.mock import patch

import pytest

from corolla.block_server import hop_session
from corolla.block_server.hop_session import TRANSITIONS, SessionEvent, SessionState
from tests.simulation.run import run


@pytest.mark.parametrize(
    "state, event", [(SessionState.NEW, SessionEvent.OPENED), (SessionState.RUNNING, SessionEvent.FREED)]
)
def test_a_forbidden_session_transition_breaks_a_run(state: SessionState, event: SessionEvent) -> None:
    """Also when the server continues, as after any command that raised."""
    smaller = {**TRANSITIONS, state: {each: after for each, after in TRANSITIONS[state].items() if each is not event}}
    with patch.object(hop_session, "TRANSITIONS", smaller):
        broken = run(0).broken
    assert any(f"a session that is {state.value} cannot be: {event.value}" in line for line in broken)
