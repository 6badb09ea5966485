"""In blocks with recurrent states, rows of one token share a call, and no row changes another's bits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.row_parts import apart
from corolla.compute.single_rows import SingleRows
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.delta_rule import step_states
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(0, 2)  # a state, and attention
# So many that the gates of all rows, one number each, fill whole vectors, and those of one row do not.
NUM_ROWS = 37


@pytest.mark.parametrize(
    "family, products, dtype",
    [
        ("qwen3_next", "library", torch.float32),
        ("qwen3_5_moe_text", "panels", torch.bfloat16),
        pytest.param("lfm2_moe", "library", torch.float32, marks=pytest.mark.kind),
        pytest.param("kimi_linear", "panels", torch.float32, marks=pytest.mark.kind),
    ],
)
def test_a_row_has_the_same_bits_in_every_mixture(
    tmp_path: Path, family: str, products: str, dtype: torch.dtype
) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, tmp_path / family, num_blocks=2)))
    runner = SpanRunner(load_span(checkpoint, SPAN, dtype=dtype), page_tokens=16, products=products)
    attention = SpanRunner(load_span(checkpoint, Span(1, 2), dtype=dtype), page_tokens=16, products=products)
    assert isinstance(runner.blocks, SingleRows)
    assert isinstance(attention.blocks, SingleRows)
    generator = torch.Generator().manual_seed(0)
    texts, tokens = (torch.randn(NUM_ROWS, count, checkpoint.hidden_size, generator=generator) for count in (3, 2))
    caches = []
    for text in texts[:5]:
        caches.append(runner.new_cache())
        runner.forward([RowWork(caches[-1], 0, len(text))], text, SPAN)
    caches += [caches[number % 5].fork() for number in range(5, NUM_ROWS)]
    twins = [cache.fork() for cache in caches]

    def step(numbers: list[int], position: int, of: list[SessionCache]) -> list[Tensor]:
        rows, inputs = [RowWork(of[number], position, 1) for number in numbers], tokens[numbers, position - 3]
        return list(torch.split(runner.forward(rows, inputs, SPAN), 1))

    alone = [[step([number], position, twins)[0] for number in range(NUM_ROWS)] for position in (3, 4)]
    everyone = list(range(NUM_ROWS))
    for found, expected in zip(step(everyone, 3, caches), alone[0], strict=True):
        assert torch.equal(found, expected)
    # In another order, in other company, next to a prompt.
    for numbers in ([5, 0, 36], [3, 1]):
        for found, number in zip(step(numbers, 4, caches), numbers, strict=True):
            assert torch.equal(found, alone[1][number])
    rows = [RowWork(caches[2], 4, 1), RowWork(runner.new_cache(), 0, 3), RowWork(caches[8], 4, 1)]
    found = runner.forward(rows, torch.cat((tokens[2, 1:], texts[0], tokens[8, 1:])), SPAN)
    assert torch.equal(found[[0, 4]], torch.cat((alone[1][2], alone[1][8])))
    assert found[1:4].isfinite().all()


def test_a_function_of_wide_rows_gives_a_row_the_same_bits_in_several_threads() -> None:
    rows, before = torch.randn(7, 11_000, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for function in (functional.silu, functional.softplus):
            alone = torch.cat([apart(function, row) for row in torch.split(rows, 1)])
            assert torch.equal(apart(function, rows), alone)
            torch.testing.assert_close(alone, function(rows))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("heads, key_heads, key_size, value_size", [(4, 2, 8, 48), (3, 3, 128, 128)])
def test_a_step_of_states_is_that_of_transformers(heads: int, key_heads: int, key_size: int, value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    states = [draw(1, heads, key_size, value_size) for _ in range(3)]
    query, key, value = draw(3, key_heads, key_size), draw(3, key_heads, key_size) / 8, draw(3, heads, value_size)
    rate, decay = draw(2, 3, heads).sigmoid()
    held = [each.clone() for each in states]
    output, after = step_states(states, query, key, value, decay, rate, scaling=key_size**-0.5)
    expected, expected_states = torch_recurrent_gated_delta_rule(
        *(each.unsqueeze(1) for each in (query, key, value)), decay.log().unsqueeze(1), rate.unsqueeze(1),
        initial_state=torch.cat(states), output_final_state=True,
    )  # fmt: skip
    torch.testing.assert_close(output, expected[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(after), expected_states, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, states, held))
    wide = decay.unsqueeze(-1).expand(-1, -1, key_size).contiguous()
    again, after_wide = step_states(states, query, key, value, wide, rate, scaling=key_size**-0.5)
    assert torch.equal(again, output)
    assert all(map(torch.equal, after_wide, after))
