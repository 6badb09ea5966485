"""When microbatches leave, for any number of sessions, hops and draft tokens."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.microbatch_rules import MicrobatchRules

RULES = st.builds(MicrobatchRules, max_under_way=st.integers(1, 5), max_tokens=st.integers(1, 40))
WAITING = st.lists(st.integers(1, 20), max_size=30)


@given(RULES, WAITING, st.integers(0, 60), st.integers(0, 6), st.booleans())
def test_a_microbatch_is_a_share_of_the_sessions_within_the_limits_of_hops(
    rules: MicrobatchRules, waiting: list[int], num_sessions: int, num_under_way: int, may_come: bool
) -> None:
    leaving = waiting[: rules.num_leaving(waiting, num_sessions, num_under_way, may_come=may_come)]
    assert len(leaving) <= rules.share(num_sessions)
    assert sum(leaving) <= rules.max_tokens or len(leaving) == 1
    assert not leaving or num_under_way < rules.max_under_way


@given(RULES, WAITING.filter(bool), st.integers(0, 60))
def test_a_microbatch_leaves_when_no_other_row_can_come(
    rules: MicrobatchRules, waiting: list[int], num_sessions: int
) -> None:
    assert rules.num_leaving(waiting, num_sessions, 0, may_come=False)
    assert rules.num_leaving([1], 1, 0, may_come=True) == 1, "a single stream never waits"


@given(st.integers(1, 5), st.integers(1, 60))
def test_the_sessions_of_a_busy_chain_are_as_many_microbatches_as_hops(num_hops: int, num_sessions: int) -> None:
    rules = MicrobatchRules(num_hops, max_tokens=1000)
    waiting = [1] * num_sessions
    microbatches: list[int] = []
    while number := rules.num_leaving(waiting, num_sessions, len(microbatches), may_come=True):
        microbatches.append(number)
        del waiting[:number]
    # Those who are left over leave as soon as a microbatch is back, if they are not a whole share.
    assert len(microbatches) == min(num_hops, num_sessions // rules.share(num_sessions))
    assert len(set(microbatches)) == 1


def test_an_incomplete_microbatch_waits_for_rows_under_way_and_rows_that_may_come() -> None:
    rules = MicrobatchRules(max_under_way=2, max_tokens=100)
    assert rules.num_leaving([1, 1, 1], 8, 1, may_come=False) == 0
    assert rules.num_leaving([1, 1, 1], 8, 0, may_come=True) == 0
    assert rules.num_leaving([1, 1, 1], 8, 0, may_come=False) == 3
    assert rules.num_leaving([1, 1, 1, 1, 1], 8, 1, may_come=True) == 4
    assert rules.num_leaving([1, 1, 1, 1], 8, 2, may_come=False) == 0


def test_a_step_that_is_longer_than_the_bound_goes_alone() -> None:
    rules = MicrobatchRules(max_under_way=1, max_tokens=10)
    assert rules.num_leaving([16, 1, 1], 3, 0, may_come=False) == 1
    assert rules.num_leaving([4, 6, 1], 3, 0, may_come=False) == 2
