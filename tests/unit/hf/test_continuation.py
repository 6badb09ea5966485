"""A further call gets all of the text, only the new part, or nothing."""

import pytest
import torch
from torch import Tensor

from corolla.hf.generation import continuation_of

TEXT = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize(
    "given, whole, num_omitted",
    [
        (None, [5, 6, 7], 3),
        ([8, 9], [5, 6, 7, 8, 9], 3),
        ([5, 6, 7, 8], [5, 6, 7, 8], 0),
        ([5, 6, 7], [5, 6, 7], 0),
        # Another beginning is something new, however long it is.
        ([5, 6, 1, 8], [5, 6, 7, 5, 6, 1, 8], 3),
        ([5, 6], [5, 6, 7, 5, 6], 3),
    ],
)
def test_texts_are_joined(given: list[int] | None, whole: list[int], num_omitted: int) -> None:
    text = continuation_of(TEXT, None, None if given is None else torch.tensor([given]), None)
    assert text.token_ids.tolist() == [whole]
    assert text.num_omitted == num_omitted
    assert text.mask is None


@pytest.mark.parametrize(
    "text_mask, mask, whole",
    [
        (None, [1, 1], [1, 1, 1, 1, 1]),
        ([0, 1, 1], None, [0, 1, 1, 1, 1]),
        ([0, 1, 1], [0, 1], [0, 1, 1, 0, 1]),
        ([0, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
    ],
)
def test_masks_are_joined(text_mask: list[int] | None, mask: list[int] | None, whole: list[int]) -> None:
    def tensor(values: list[int] | None) -> Tensor | None:
        return None if values is None else torch.tensor([values])

    text = continuation_of(TEXT, tensor(text_mask), torch.tensor([[8, 9]]), tensor(mask))
    assert text.mask is not None
    assert text.mask.tolist() == [whole]


@pytest.mark.parametrize("given", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)])
def test_another_batch_is_refused(given: Tensor) -> None:
    with pytest.raises(ValueError, match="holds 1 sequences"):
        continuation_of(TEXT, None, given, None)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_mask"):
        continuation_of(TEXT, None, torch.tensor([[8, 9]]), torch.ones(1, 4, dtype=torch.int64))
