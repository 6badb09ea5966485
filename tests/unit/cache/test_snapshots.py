"""Which recurrent states stay for other sessions, and which go first."""

import pytest

from corolla.cache.snapshots import StateSnapshots


def test_what_was_used_least_recently_goes_first() -> None:
    snapshots = StateSnapshots[str](2)
    snapshots.keep(b"a", "states of a")
    snapshots.keep(b"b", "states of b")
    assert snapshots.use(b"a") == "states of a"
    snapshots.keep(b"c", "states of c")
    assert [name in snapshots for name in (b"a", b"b", b"c")] == [True, False, True]
    with pytest.raises(KeyError):
        snapshots.use(b"b")


def test_earlier_ends_of_a_prompt_go_before_its_last_one_and_before_other_prompts() -> None:
    snapshots = StateSnapshots[int](4)
    snapshots.keep(b"other", 0)
    ends = [b"512", b"1024", b"1536"]
    for number, name in enumerate(ends):
        snapshots.keep(name, number, after=ends[number - 1] if number else None)
    snapshots.keep(b"new", 9)
    assert [name in snapshots for name in (b"other", *ends)] == [True, True, False, True]
    snapshots.keep(b"newer", 9)
    assert [name in snapshots for name in (b"other", *ends)] == [True, False, False, True]


def test_states_wait_for_a_name_and_get_it_once() -> None:
    snapshots = StateSnapshots[str](3)
    session = object()
    assert snapshots.unnamed_position(session) == 0
    snapshots.keep_unnamed(session, 32, "at 32")
    snapshots.keep_unnamed(session, 64, "at 64")
    assert (snapshots.unnamed_position(session), len(snapshots)) == (64, 1)
    snapshots.give_name(session, b"name")
    assert (snapshots.use(b"name"), snapshots.unnamed_position(session)) == ("at 64", 0)
    with pytest.raises(KeyError):
        snapshots.give_name(session, b"again")
    snapshots.keep_unnamed(session, 96, "at 96")
    snapshots.drop_unnamed(session)
    snapshots.drop_unnamed(session)
    assert len(snapshots) == 1


def test_many_answers_leave_prompts_three_quarters_of_the_places() -> None:
    snapshots = StateSnapshots[int](8)
    names = [bytes([number]) for number in range(8)]
    for number, name in enumerate(names):
        snapshots.keep(name, number)
    sessions = [object() for _ in range(5)]
    for session in sessions:
        snapshots.keep_unnamed(session, 32, 0)
    assert [name in snapshots for name in names] == [False] * 2 + [True] * 6
    assert [snapshots.unnamed_position(session) for session in sessions] == [0, 0, 0, 32, 32]
    assert len(snapshots) == 8


@pytest.mark.parametrize("num_places", [0, 1])
def test_a_small_budget_holds(num_places: int) -> None:
    snapshots = StateSnapshots[int](num_places)
    for number in range(4):
        snapshots.keep(bytes([number]), number)
        snapshots.keep_unnamed(number, 32, number)
        assert len(snapshots) <= num_places
