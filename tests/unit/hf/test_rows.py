"""The record of held tokens: which tokens are reused, cut, forked and left out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from corolla.hf.rows import UNKNOWN_TOKEN, HeldRows


def rows_of(*texts: list[int]) -> HeldRows:
    held = HeldRows(len(texts))
    held.extend(torch.tensor(texts), torch.ones(len(texts), len(texts[0]), dtype=torch.bool))
    return held


def ones_like(token_ids: Tensor) -> Tensor:
    return torch.ones_like(token_ids, dtype=torch.bool)


def align(held: HeldRows, *texts: list[int]) -> None:
    token_ids = torch.tensor(texts)
    held.align(token_ids, ones_like(token_ids))


def test_a_longer_text_keeps_everything() -> None:
    held = rows_of([5, 6, 7])
    align(held, [5, 6, 7, 8])
    assert held.position == 3
    assert held.is_settled


def test_one_token_is_always_left_to_process() -> None:
    held = rows_of([5, 6, 7])
    align(held, [5, 6, 7])
    assert held.position == 2


def test_tokens_that_differ_are_forgotten() -> None:
    held = rows_of([5, 6, 7, 8])
    align(held, [5, 6, 1, 8, 9])
    assert held.position == 2


def test_a_row_begins_as_the_one_that_agrees_longest() -> None:
    held = rows_of([5, 6, 7, 8], [5, 6, 1, 2])
    align(held, [5, 6, 1, 2, 3], [5, 6, 7, 8, 9])
    assert held.sources == [1, 0]
    assert held.position == 4


def test_beams_become_the_one_answer() -> None:
    held = rows_of([5, 6, 1], [5, 6, 2], [5, 6, 3])
    align(held, [5, 6, 2, 9])
    assert held.sources == [1]
    assert held.num_rows == 1


def test_an_answer_becomes_beams() -> None:
    held = rows_of([5, 6, 7])
    align(held, *[[5, 6, 7, 8]] * 3)
    assert held.sources == [0, 0, 0]
    assert held.token_ids.tolist() == [[5, 6, 7]] * 3


def test_other_padding_is_another_text() -> None:
    held = HeldRows(1)
    held.extend(torch.tensor([[0, 5, 6]]), torch.tensor([[False, True, True]]))
    assert held.row_positions == [2]
    token_ids = torch.tensor([[0, 5, 6, 7]])
    held.align(token_ids, torch.tensor([[False, True, True, True]]))
    assert held.position == 3
    held.align(token_ids, ones_like(token_ids))
    assert held.position == 0


def test_masked_columns_are_ignored() -> None:
    held = HeldRows(1)
    held.extend(torch.tensor([[0, 5, 6]]), torch.tensor([[False, True, True]]))
    held.align(torch.tensor([[9, 5, 6, 7]]), torch.tensor([[False, True, True, True]]))
    assert held.position == 3


def test_given_embeddings_equal_no_token() -> None:
    held = rows_of([UNKNOWN_TOKEN, UNKNOWN_TOKEN, 7])
    align(held, [5, 6, 7, 8])
    assert held.position == 0


def test_a_prefix_stays_and_goes_with_its_row() -> None:
    held = rows_of([UNKNOWN_TOKEN, 5, 6], [UNKNOWN_TOKEN, 7, 8])
    held.num_prefix = 1
    align(held, [5, 6, 9], [5, 6, 9], [7, 8, 9], [7, 8, 9])
    assert held.sources == [0, 0, 1, 1]
    assert held.position == 3
    # The texts agree with the other row's, but its prefix is another.
    align(held, [7, 8, 9], [7, 8, 9], [5, 6, 9], [5, 6, 9])
    assert held.position == 1


def test_embeddings_before_the_text_are_its_prefix() -> None:
    held = rows_of([UNKNOWN_TOKEN, UNKNOWN_TOKEN, 7])
    held.count_prefix()
    assert held.num_prefix == 2


def test_embeddings_behind_text_leave_no_text() -> None:
    held = rows_of([UNKNOWN_TOKEN, 7, UNKNOWN_TOKEN])
    with pytest.raises(ValueError, match="by hand"):
        held.count_prefix()


def test_forks_of_forks_name_the_place_that_has_the_tokens() -> None:
    held = rows_of([1], [2], [3])
    held.select([2, 2, 0])
    held.select([1, 2, 2])
    assert held.sources == [2, 0, 0]
    assert held.token_ids.flatten().tolist() == [3, 1, 1]


texts = st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=1, max_size=4)


@given(texts, texts)
def test_held_tokens_agree_with_the_text(before: list[list[int]], after: list[list[int]]) -> None:
    held = rows_of(*before)
    align(held, *after)
    kept = held.position
    assert held.token_ids.tolist() == [row[:kept] for row in after]
    assert [before[source][:kept] for source in held.sources] == [row[:kept] for row in after]
    agreement = [max(next((i for i in range(6) if row[i] != other[i]), 6) for other in before) for row in after]
    assert kept == min(5, *agreement)
