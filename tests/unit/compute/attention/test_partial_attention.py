"""Kernels give the definition's parts, and parts of any cut merge into the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.compute.attention.partial_attention import Kernel, flash_cpu, math, merge

kernels = pytest.mark.parametrize("kernel", [flash_cpu, math])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    scores = query.double() @ keys.double().transpose(2, 3) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return (scores.softmax(dim=-1) @ values.double()).float()


@kernels
@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 29), max_size=4), num_queries=st.integers(1, 5), seed=st.integers(0, 1000))
def test_parts_of_any_cut_merge_into_the_whole(kernel: Kernel, cuts: set[int], num_queries: int, seed: int) -> None:
    query, keys, values = draw(1, 2, num_queries, 16, seed=seed), draw(1, 2, 30, 16, seed=seed + 1), draw(1, 2, 30, 16)
    ends = [*sorted(cuts), 30]
    parts = [
        kernel(query, keys[:, :, start:end], values[:, :, start:end], scaling=0.3)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    torch.testing.assert_close(merge(parts), definition(query, keys, values), rtol=0, atol=2e-6)


@kernels
def test_a_query_that_sees_nothing_of_a_part_gives_it_no_weight(kernel: Kernel) -> None:
    query, keys, values = draw(1, 2, 3, 16), draw(1, 2, 8, 16, seed=1), draw(1, 2, 8, 16, seed=2)
    bias = torch.zeros(3, 4)
    bias[1] = -torch.inf
    first = kernel(query, keys[:, :, :4], values[:, :, :4], scaling=0.3, bias=bias)
    second = kernel(query, keys[:, :, 4:], values[:, :, 4:], scaling=0.3)
    assert torch.isfinite(first[0]).all()
    merged = merge([first, second])
    torch.testing.assert_close(merged[:, :, [0, 2]], definition(query, keys, values)[:, :, [0, 2]], rtol=0, atol=2e-6)
    blind = definition(query, keys[:, :, 4:], values[:, :, 4:])
    torch.testing.assert_close(merged[:, :, 1], blind[:, :, 1], rtol=0, atol=2e-6)


@kernels
def test_causal_queries_see_no_later_key(kernel: Kernel) -> None:
    query, keys, values = draw(1, 2, 6, 16), draw(1, 2, 6, 16, seed=1), draw(1, 2, 6, 16, seed=2)
    output, _ = kernel(query, keys, values, scaling=0.3, is_causal=True)
    for index in range(6):
        seen = definition(query[:, :, index : index + 1], keys[:, :, : index + 1], values[:, :, : index + 1])
        torch.testing.assert_close(output[:, :, index : index + 1], seen, rtol=0, atol=2e-6)


@kernels
def test_scores_are_capped(kernel: Kernel) -> None:
    query, keys, values = draw(1, 2, 1, 16), draw(1, 2, 9, 16, seed=1), draw(1, 2, 9, 16, seed=2)
    output, _ = kernel(query, keys, values, scaling=0.3, softcap=0.5)
    torch.testing.assert_close(output, definition(query, keys, values, softcap=0.5), rtol=0, atol=2e-6)


def test_flash_reads_keys_as_they_lie() -> None:
    pool_keys, pool_values, query = draw(40, 2, 16), draw(40, 2, 16, seed=1), draw(1, 2, 3, 16, seed=2)
    keys, values = (pool[7:20].transpose(0, 1).unsqueeze(0) for pool in (pool_keys, pool_values))
    assert not keys.is_contiguous()
    output, _ = flash_cpu(query, keys, values, scaling=0.3)
    torch.testing.assert_close(output, definition(query, keys, values), rtol=0, atol=2e-6)


@kernels
def test_heads_may_lie_number_by_number(kernel: Kernel) -> None:
    """Products that were computed column by column come like this."""
    query, keys, values = (draw(1, 2, 6, 16, seed=seed) for seed in range(3))
    scattered = [tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for tensor in (query, keys, values)]
    assert all(tensor.stride(-1) != 1 for tensor in scattered)
    output, _ = kernel(*scattered, scaling=0.3)
    torch.testing.assert_close(output, definition(query, keys, values), rtol=0, atol=2e-6)
