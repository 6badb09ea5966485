"""Parts of any cut merge into the whole."""

from functools import reduce

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corolla.compute.attention.partial_attention import attend, merge


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = query.double() @ keys.double().transpose(2, 3) * 0.3
    return (scores.softmax(dim=-1) @ values.double()).float()


@settings(max_examples=40, deadline=None)
@given(cuts=st.sets(st.integers(1, 29), max_size=4), num_queries=st.integers(1, 5), seed=st.integers(0, 1000))
def test_parts_of_any_cut_merge_into_the_whole(cuts: set[int], num_queries: int, seed: int) -> None:
    query, keys, values = draw(1, 2, num_queries, 16, seed=seed), draw(1, 2, 30, 16, seed=seed + 1), draw(1, 2, 30, 16)
    ends = [*sorted(cuts), 30]
    parts = [
        attend(query, keys[:, :, start:end], values[:, :, start:end], scaling=0.3)
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    torch.testing.assert_close(reduce(merge, parts)[0], definition(query, keys, values), rtol=0, atol=2e-6)


def test_a_query_that_sees_nothing_of_a_part_gives_it_no_weight() -> None:
    query, keys, values = draw(1, 2, 3, 16), draw(1, 2, 8, 16, seed=1), draw(1, 2, 8, 16, seed=2)
    bias = torch.zeros(3, 4)
    bias[1] = -torch.inf
    first = attend(query, keys[:, :, :4], values[:, :, :4], scaling=0.3)
    second = attend(query, keys[:, :, 4:], values[:, :, 4:], scaling=0.3, bias=bias)
    assert torch.isfinite(second[0]).all()
    merged, _ = merge(first, second)
    torch.testing.assert_close(merged[:, :, [0, 2]], definition(query, keys, values)[:, :, [0, 2]], rtol=0, atol=2e-6)
    blind = definition(query, keys[:, :, :4], values[:, :, :4])
    torch.testing.assert_close(merged[:, :, 1], blind[:, :, 1], rtol=0, atol=2e-6)
