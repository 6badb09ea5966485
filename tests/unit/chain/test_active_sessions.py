"""Which sessions microbatches wait for, for any order of steps and pauses."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.microbatch_rules import ActiveSessions

SESSIONS = [bytes([number]) for number in range(5)]
HAPPENINGS = st.lists(st.tuples(st.sampled_from(["come", "answer", "leave", "depart"]), st.sampled_from(SESSIONS)))


def play(active: ActiveSessions, happenings: Sequence[tuple[str, bytes]]) -> set[bytes]:
    """Returns the sessions with a step waiting or under way."""
    in_step: set[bytes] = set()
    for name, session_id in happenings:
        match name:
            case "come":
                active.begin_step(session_id)
                in_step.add(session_id)
            case "answer":
                active.end_step(session_id)
                in_step.discard(session_id)
            case "leave":
                active.remove(session_id)
                in_step.discard(session_id)
            case _:
                active.note_sent()
    return in_step


@given(HAPPENINGS, st.integers(1, 4))
def test_sessions_in_a_step_are_counted_and_long_paused_ones_are_not(
    happenings: list[tuple[str, bytes]], num_hops: int
) -> None:
    active = ActiveSessions(num_hops)
    in_step = play(active, happenings)
    assert len(in_step) <= active.num_sessions <= len(SESSIONS)
    for _ in range(2 * num_hops + 1):
        active.note_sent()
    assert active.num_sessions == len(in_step)


@given(HAPPENINGS, st.integers(1, 4), st.sampled_from(SESSIONS), st.integers(0, 4))
def test_a_session_that_returns_in_time_stays_counted(
    happenings: list[tuple[str, bytes]], num_hops: int, session_id: bytes, num_microbatches: int
) -> None:
    active = ActiveSessions(num_hops)
    play(active, happenings)
    active.begin_step(session_id)
    active.end_step(session_id)
    for _ in range(min(num_microbatches, 2 * num_hops)):
        active.note_sent()
    num_sessions = active.num_sessions
    active.remove(session_id)
    assert active.num_sessions == num_sessions - 1


def test_a_paused_session_counts_again_from_its_next_step() -> None:
    active = ActiveSessions(num_per_round=1)
    for session_id in SESSIONS[:2]:
        active.begin_step(session_id)
    active.end_step(SESSIONS[0])
    counts = []
    for _ in range(4):
        active.note_sent()
        counts.append(active.num_sessions)
    assert counts == [2, 2, 1, 1]
    active.end_step(SESSIONS[0])  # not expected: changes nothing
    assert active.num_sessions == 1
    active.begin_step(SESSIONS[0])
    assert active.num_sessions == 2
    active.remove(SESSIONS[0])
    active.remove(SESSIONS[1])
    assert active.num_sessions == 0
