"""The steps of a replay: all tokens once, in order, and in the shapes that they had."""

from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.history import StepShapes

steps = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20)


def shapes_of(given_steps: list[tuple[int, bool]]) -> StepShapes:
    shapes = StepShapes()
    for num_tokens, is_prompt in given_steps:
        shapes.append(num_tokens, is_prompt=is_prompt)
    return shapes


@given(steps, st.integers(1, 12), st.data())
def test_a_replay_takes_every_token_once_and_in_order(
    given_steps: list[tuple[int, bool]], max_tokens: int, data: st.DataObject
) -> None:
    shapes = shapes_of(given_steps)
    start = data.draw(st.integers(0, shapes.num_tokens))
    replayed = list(shapes.replay(start, max_tokens))
    assert [token for begin, end in replayed for token in range(begin, end)] == list(range(start, shapes.num_tokens))
    assert all(0 < end - begin <= max_tokens for begin, end in replayed)


def test_single_tokens_are_merged_and_chunks_of_prompts_stay_as_they_were() -> None:
    shapes = shapes_of([(8, True), (3, True), *[(1, False)] * 5, (2, False), (4, True), (1, False)])
    assert list(shapes.replay(0, 8)) == [(0, 8), (8, 11), (11, 18), (18, 22), (22, 23)]
    assert list(shapes.replay(2, 4)) == [(2, 6), (6, 8), (8, 11), (11, 15), (15, 18), (18, 22), (22, 23)]


@given(steps, st.data())
def test_truncated_steps_leave_no_trace(given_steps: list[tuple[int, bool]], data: st.DataObject) -> None:
    shapes = shapes_of(given_steps)
    position = data.draw(st.integers(0, shapes.num_tokens))
    untouched = shapes.copy()
    shapes.truncate(position)
    assert shapes.num_tokens == sum(shapes.lengths) == position
    shapes.append(2, is_prompt=False)
    lengths = [end - begin for begin, end in shapes.replay(0, 9)]
    assert sum(lengths) == position + 2
    assert untouched.num_tokens == sum(num_tokens for num_tokens, _ in given_steps)
