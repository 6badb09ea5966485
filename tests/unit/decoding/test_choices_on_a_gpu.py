"""Choices of tokens on a GPU (`tests.gpu_double`)."""

import torch

from corolla.decoding.parameters import SamplingParams
from corolla.decoding.sampling import Sampler, sample_together
from tests.gpu_double import a_gpu


def test_a_choice_waits_for_its_tokens_alone() -> None:
    """Whatever the rows want, nothing before the reading keeps the host from launching more."""
    params = [
        SamplingParams(1.5, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.2, seed=1, num_logprobs=2),
        SamplingParams(0.8, top_k=5, min_p=0.01, seed=2),
        SamplingParams(0.0, logit_bias=((3, 1.5), (7, -2.0)), frequency_penalty=0.3),
    ]
    plain, there = ([Sampler(each, (3, 1, 4)) for each in params] for _ in range(2))
    all_logits = torch.randn(4, len(params), 50, generator=torch.Generator().manual_seed(0))
    expected = [sample_together(plain, logits) for logits in all_logits]
    with a_gpu() as gpu, torch.inference_mode():
        for logits, tokens in zip(all_logits, expected, strict=True):
            assert sample_together(there, gpu.put(logits)) == tokens
            assert not gpu.waits
