"""The record of held tokens: which tokens are reused, cut, forked and left out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.hf.rows import UNKNOWN_TOKEN, HeldRows


def rows_of(*texts: list[int]) -> HeldRows:
    held = HeldRows(len(texts))
    held.extend(torch.tensor(texts), torch.ones(len(texts), len(texts[0]), dtype=torch.bool))
    return held


def align(held: HeldRows, *texts: list[int]) -> None:
    held.align(torch.tensor(texts), torch.ones(len(texts), len(texts[0]), dtype=torch.bool))


LONG = [[5, 6, 7]]


@pytest.mark.parametrize(
    "before, after, kept, sources",
    [
        (LONG, [[5, 6, 7, 8]], 3, [0]),
        # One token is always left to process.
        (LONG, LONG, 2, [0]),
        # A row begins as the one that agrees longest.
        ([[5, 6, 7, 8], [5, 6, 1, 2]], [[5, 6, 1, 2, 3], [5, 6, 7, 8, 9]], 4, [1, 0]),
        # Embeddings equal no token.
        ([[UNKNOWN_TOKEN, UNKNOWN_TOKEN, 7]], [[5, 6, 7, 8]], 0, [0]),
    ],
)
def test_a_text_keeps_what_agrees_with_it(
    before: list[list[int]], after: list[list[int]], kept: int, sources: list[int]
) -> None:
    held = rows_of(*before)
    align(held, *after)
    assert (held.position, held.num_rows) == (kept, len(after))
    assert (held.sources, held.is_settled) == (sources, sources == list(range(len(before))))
    assert held.token_ids.tolist() == [row[:kept] for row in after]


def test_masked_columns_are_ignored_and_other_padding_is_another_text() -> None:
    held, mask = HeldRows(1), torch.tensor([[False, True, True, True]])
    held.extend(torch.tensor([[0, 5, 6]]), mask[:, :3])
    assert held.row_positions == [2]
    held.align(torch.tensor([[9, 5, 6, 7]]), mask)
    assert held.position == 3
    held.align(torch.tensor([[0, 5, 6, 7]]), torch.ones(1, 4, dtype=torch.bool))
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


def test_embeddings_before_the_text_are_its_prefix_and_behind_text_leave_none() -> None:
    held = rows_of([UNKNOWN_TOKEN, UNKNOWN_TOKEN, 7])
    held.count_prefix()
    assert held.num_prefix == 2
    with pytest.raises(ValueError, match="by hand"):
        rows_of([UNKNOWN_TOKEN, 7, UNKNOWN_TOKEN]).count_prefix()


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
