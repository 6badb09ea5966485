"""When microbatches leave, for any number of sessions, hops and draft tokens."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.ring.microbatch_rules import MicrobatchRules

RULES = st.builds(MicrobatchRules, max_under_way=st.integers(1, 5), max_tokens=st.integers(1, 40))
WAITING = st.lists(st.integers(1, 20), max_size=30)


@given(RULES, WAITING, st.integers(0, 6), st.integers(0, 60))
def test_a_microbatch_is_a_share_of_the_sessions_within_the_limits_of_hops(
    rules: MicrobatchRules, waiting: list[int], num_under_way: int, num_rows_under_way: int
) -> None:
    leaving = waiting[: rules.num_leaving(waiting, num_under_way, num_rows_under_way)]
    num_sessions = len(waiting) + num_rows_under_way
    assert len(leaving) * rules.max_under_way < num_sessions + rules.max_under_way
    assert sum(leaving) <= rules.max_tokens or len(leaving) == 1
    assert bool(leaving) == (bool(waiting) and num_under_way < rules.max_under_way)


@given(st.integers(1, 5), st.integers(1, 60))
def test_sessions_that_begin_one_by_one_spread_evenly_over_the_hops(num_hops: int, num_sessions: int) -> None:
    rules = MicrobatchRules(num_hops, max_tokens=1000)
    under_way: list[int] = []
    waiting = 0
    sent: list[int] = []

    def send() -> None:
        nonlocal waiting
        while number := rules.num_leaving([1] * waiting, len(under_way), sum(under_way)):
            waiting -= number
            under_way.append(number)
            sent.append(number)

    for _ in range(num_sessions):
        waiting += 1
        send()
    for _ in range(3 * num_hops):
        waiting += under_way.pop(0)
        send()
    assert len(under_way) == min(num_hops, num_sessions)
    assert max(under_way) <= -(-num_sessions // num_hops)


def test_a_row_that_is_longer_than_the_bound_goes_alone() -> None:
    rules = MicrobatchRules(max_under_way=1, max_tokens=10)
    assert rules.num_leaving([16, 1, 1], 0, 0) == 1
    assert rules.num_leaving([4, 6, 1], 0, 0) == 2
