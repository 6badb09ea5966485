"""In which parts a session travels, whatever fails on the way."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.handover.plan import MAX_LAST_TOKENS, MAX_REPEATS, HandoverProgress, part_tokens


class Leaving:
    """A session that computes while it is handed over. Tokens are numbered as they are computed, so none come twice."""

    def __init__(self, num_tokens: int) -> None:
        self.held = list(range(num_tokens))
        self.num_unchanged = 0
        self._next_token = num_tokens

    def change(self, by: int) -> None:
        """Computes tokens, or goes back by some and computes one anew."""
        if by < 0:
            del self.held[max(0, len(self.held) + by) :]
            self.num_unchanged = min(self.num_unchanged, len(self.held))
            by = 1
        self.held += range(self._next_token, self._next_token + by)
        self._next_token += by

    def copy(self, start: int, count: int) -> tuple[int, list[int]]:
        self.num_unchanged = start + count
        return start, self.held[start : start + count]


@given(
    num_tokens=st.integers(0, 60),
    max_tokens=st.integers(1, 30),
    changes=st.lists(
        st.tuples(st.integers(-6, 6), st.integers(-6, 6), st.sampled_from(["taken", "refused", "broken", "no answer"])),
        max_size=30,
    ),
    is_idle=st.booleans(),
)
def test_the_receiver_ends_with_exactly_the_senders_tokens(
    num_tokens: int, max_tokens: int, changes: list[tuple[int, int, str]], is_idle: bool
) -> None:
    """It changes between the parts and while they travel; parts are refused, and streams break before and after one."""
    session, progress = Leaving(num_tokens), HandoverProgress()
    received: list[int] = []
    has_caught_up = False
    progress.begin(0)
    # In the end nothing happens any more, for as many parts as there may be tokens.
    for before, meanwhile, fate in [*changes, *[(0, 0, "taken")] * (60 + 12 * 30)]:
        session.change(before)
        start, count, is_last = progress.next_part(
            len(session.held), session.num_unchanged, max_tokens, is_idle=is_idle
        )
        if is_last and not is_idle:
            assert count <= MAX_LAST_TOKENS or has_caught_up
        has_caught_up |= start + count == len(session.held)
        start, tokens = session.copy(start, count)
        assert len(tokens) <= max_tokens
        if not is_last:
            session.change(meanwhile)
        if fate in ("taken", "no answer"):
            assert start <= len(received)
            received = received[:start] + tokens
        if fate == "taken":
            progress.answered(len(received), taken=True)
            if is_last:
                assert received == session.held
                return
            continue
        if fate == "refused":
            progress.answered(len(received), taken=False)
        else:
            progress.begin(len(received))
    raise AssertionError("it does not end")


def test_a_receiver_that_takes_nothing_is_given_up() -> None:
    progress = HandoverProgress()
    progress.next_part(5, 0, 1)
    assert all(progress.answered(0, taken=False) for _ in range(MAX_REPEATS - 1))
    assert not progress.answered(0, taken=False)
    # What is taken in between counts as getting on.
    progress = HandoverProgress()
    for number in range(4 * MAX_REPEATS):
        progress.next_part(5, 0, 1)
        assert progress.answered(0, taken=number % 2 == 0)


def test_fewer_tokens_wait_for_their_part_if_the_text_is_long() -> None:
    lengths = (1, 2048, 4096, 8192, 1 << 20)
    assert [part_tokens(each) for each in lengths] == [16, 16, 8, 4, 1]
