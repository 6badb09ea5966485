"""Whom gangs count on, whatever sessions do."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from corolla.client.chain.attendance import Attendance

SESSIONS = [bytes([number]) for number in range(5)]
HAPPENINGS = st.lists(st.tuples(st.sampled_from(["come", "answer", "leave", "depart"]), st.sampled_from(SESSIONS)))


def play(attendance: Attendance, happenings: Sequence[tuple[str, bytes]]) -> set[bytes]:
    """Returns who has a step waiting or under way."""
    in_step: set[bytes] = set()
    for name, session_id in happenings:
        match name:
            case "come":
                attendance.come(session_id)
                in_step.add(session_id)
            case "answer":
                attendance.answer(session_id)
                in_step.discard(session_id)
            case "leave":
                attendance.leave(session_id)
                in_step.discard(session_id)
            case _:
                attendance.depart()
    return in_step


@given(HAPPENINGS, st.integers(1, 4))
def test_who_has_a_step_is_counted_and_who_paused_for_long_is_not(
    happenings: list[tuple[str, bytes]], num_hops: int
) -> None:
    attendance = Attendance(num_hops)
    in_step = play(attendance, happenings)
    assert len(in_step) <= attendance.num_sessions <= len(SESSIONS)
    for _ in range(2 * num_hops + 1):
        attendance.depart()
    assert attendance.num_sessions == len(in_step)


@given(HAPPENINGS, st.integers(1, 4), st.sampled_from(SESSIONS), st.integers(0, 4))
def test_who_comes_again_in_time_is_counted_all_the_while(
    happenings: list[tuple[str, bytes]], num_hops: int, session_id: bytes, num_departures: int
) -> None:
    attendance = Attendance(num_hops)
    play(attendance, happenings)
    attendance.come(session_id)
    attendance.answer(session_id)
    for _ in range(min(num_departures, 2 * num_hops)):
        attendance.depart()
    num_sessions = attendance.num_sessions
    attendance.leave(session_id)
    assert attendance.num_sessions == num_sessions - 1


def test_who_paused_is_counted_again_from_its_next_step_on() -> None:
    attendance = Attendance(round_departures=1)
    for session_id in SESSIONS[:2]:
        attendance.come(session_id)
    attendance.answer(SESSIONS[0])
    counts = []
    for _ in range(4):
        attendance.depart()
        counts.append(attendance.num_sessions)
    assert counts == [2, 2, 1, 1]
    attendance.answer(SESSIONS[0])  # not expected: changes nothing
    assert attendance.num_sessions == 1
    attendance.come(SESSIONS[0])
    assert attendance.num_sessions == 2
    attendance.leave(SESSIONS[0])
    attendance.leave(SESSIONS[1])
    assert attendance.num_sessions == 0
