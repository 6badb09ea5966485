"""Which tokens on a hop still count after some of a sequence's were taken back."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.identity import SessionIdentity
from corolla.chain.rewinds import Rewinds, without_taken_back
from corolla.v1 import blocks_pb2 as pb


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=8), st.integers(0, 12))
def test_what_follows_from_a_step_lacks_what_was_taken_back_later(steps: list[tuple[int, int]], step_id: int) -> None:
    rewinds, all_marks, newest = Rewinds(), list[tuple[int, int]](), 0
    for passed, position in steps:
        newest += passed
        rewinds.add(newest, position)
        all_marks.append((newest, position))
    assert rewinds.num_kept(step_id) == min((kept for mark, kept in all_marks if step_id <= mark), default=None)


def test_neither_tokens_nor_outputs_that_were_taken_back_count() -> None:
    identity, rewinds = SessionIdentity(bytes(16), 1, "tenant"), Rewinds()
    rewinds.add(7, 20)
    held = pb.Opened(num_cached_tokens=30, kept_end=30, step_id=7)
    assert without_taken_back(held, identity, {}).num_cached_tokens == 30
    later = pb.Opened(num_cached_tokens=30, kept_end=30, step_id=8)
    assert without_taken_back(later, identity, {identity.session_id: rewinds}).num_cached_tokens == 30
    kept = without_taken_back(held, identity, {identity.session_id: rewinds})
    assert (kept.num_cached_tokens, kept.kept_end) == (20, 20)
