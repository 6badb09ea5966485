"""The quick filter against the library's, bit for bit."""

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from corolla.decoding.sampling import QuickTopP
from tests.tiers import covering

NO_IDS = torch.empty((1, 0), dtype=torch.int64)


@pytest.mark.parametrize(
    "top_p, spread, vocabulary_size",
    covering([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-7], [0.0, 1e-3, 1.0, 4.0, 50.0], [131, 49152, 2, 1]),
)
def test_the_same_tokens_stay_untouched(top_p: float, spread: float, vocabulary_size: int) -> None:
    quick, exact = QuickTopP(top_p), TopPLogitsWarper(top_p)
    for seed in range(3):
        scores = torch.randn(1, vocabulary_size, generator=torch.Generator().manual_seed(seed)) * spread
        kept = scores.clone()
        assert torch.equal(quick(NO_IDS, scores), exact(NO_IDS, scores))
        assert torch.equal(scores, kept)


@pytest.mark.parametrize("num_values", [1, 2, 7, 40])
def test_of_equal_tokens_the_library_chooses(num_values: int) -> None:
    for seed in range(20):
        scores = torch.randint(num_values, (1, 300), generator=torch.Generator().manual_seed(seed)) / 4
        for top_p in (0.3, 0.8, 0.97):
            assert torch.equal(QuickTopP(top_p)(NO_IDS, scores), TopPLogitsWarper(top_p)(NO_IDS, scores))


def test_tokens_that_another_filter_removed_stay_removed() -> None:
    for seed in range(20):
        scores = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)) * 3
        scores = TopKLogitsWarper(30)(NO_IDS, scores)
        assert torch.equal(QuickTopP(0.9)(NO_IDS, scores), TopPLogitsWarper(0.9)(NO_IDS, scores))
