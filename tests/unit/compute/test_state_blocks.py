"""In blocks with recurrent states, the rows of a step share a call, and no row changes another's bits."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.compute.state_blocks import StateBlocks
from corolla.kernels.recurrences import run_delta_rule, run_state_space
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.models.whole_vectors import apart
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint

SPAN = Span(0, 3)  # states, and attention
# So many that the gates of all rows, one number each, fill whole vectors, and those of one row do not.
NUM_ROWS = 37
# Families, the way of products, and the dtype.
FAMILIES = [
    ("qwen3_next", "auto", torch.float32),
    ("granitemoehybrid", "auto", torch.bfloat16),
    *(
        pytest.param(family, products, torch.float32, marks=mark)
        for family, products, mark in (
            ("falcon_h1", "library", pytest.mark.kind), ("kimi_linear", "panels", pytest.mark.kind),
            ("lfm2_moe", "library", pytest.mark.full), ("lfm3", "auto", pytest.mark.full),
            ("nemotron_h", "auto", pytest.mark.full), ("olmo_hybrid", "auto", pytest.mark.full),
        )
    ),
]  # fmt: skip


def runner_of(folder: Path, family: str, dtype: torch.dtype, **options: object) -> SpanRunner:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint(family, folder, num_blocks=3)))
    return SpanRunner(load_span(checkpoint, SPAN, dtype=dtype), page_tokens=16, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family, products, dtype", FAMILIES)
def test_a_row_has_the_same_bits_in_every_mixture(
    tmp_path: Path, family: str, products: str, dtype: torch.dtype
) -> None:
    runner = runner_of(tmp_path, family, dtype, products=products)
    assert isinstance(runner.blocks, StateBlocks)
    size = runner.model.hidden_size
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 130, 64, 1, 70)
    texts = [torch.randn(length, size, generator=generator) for length in lengths]

    def prompts(numbers: Sequence[int], starts: Sequence[int], ends: Sequence[int], of: list[SessionCache]) -> None:
        """Runs parts of texts in one call, and compares them with what they were alone."""
        places = list(zip(numbers, starts, ends, strict=True))
        rows = [RowWork(of[number], start, end - start) for number, start, end in places]
        found = runner.forward(rows, torch.cat([texts[number][start:end] for number, start, end in places]), SPAN)
        for part, (number, start, end) in zip(
            torch.split(found, [row.num_tokens for row in rows]), places, strict=True
        ):
            assert torch.equal(part, whole[number][start:end])

    caches = [runner.new_cache() for _ in texts]
    whole = [
        runner.forward([RowWork(cache, 0, len(text))], text, SPAN) for cache, text in zip(caches, texts, strict=True)
    ]
    others = [runner.new_cache() for _ in texts]
    prompts((4, 1, 3), (0, 0, 0), (64, 64, 1), others)
    prompts((1, 0, 2), (64, 0, 0), (128, 3, 64), others)
    prompts((4, 1), (64, 128), (70, 130), others)

    caches += [caches[number % 5].fork() for number in range(5, NUM_ROWS)]
    others += [others[number % 5].fork() for number in range(5, NUM_ROWS)]
    tokens = torch.randn(NUM_ROWS, 2, size, generator=generator)

    def step(numbers: Sequence[int], after: int, of: list[SessionCache]) -> list[Tensor]:
        rows = [RowWork(of[number], lengths[number % 5] + after, 1) for number in numbers]
        return list(torch.split(runner.forward(rows, tokens[list(numbers), after], SPAN), 1))

    everyone = range(NUM_ROWS)
    alone = [step([number], 0, others)[0] for number in everyone]
    assert all(map(torch.equal, step(everyone, 0, caches), alone))
    # In another order, in other company, next to a prompt.
    for numbers in ([5, 0, 36], [3, 1]):
        alone = [step([number], 1, others)[0] for number in numbers]
        assert all(map(torch.equal, step(numbers, 1, caches), alone))
    rows = [RowWork(caches[2], lengths[2] + 1, 1), RowWork(runner.new_cache(), 0, 130)]
    found = runner.forward(rows, torch.cat((tokens[2, 1:], texts[1])), SPAN)
    assert torch.equal(found[:1], step([2], 1, others)[0])
    assert torch.equal(found[1:], whole[1])


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_a_load_in_another_thread_that_changes_torchs_default_type_changes_no_state(
    tmp_path: Path, family: str
) -> None:
    runner = runner_of(tmp_path, family, torch.float32)
    hidden = torch.randn(70, runner.model.hidden_size, generator=torch.Generator().manual_seed(0))

    def computed() -> Tensor:
        return runner.forward([RowWork(runner.new_cache(), 0, len(hidden))], hidden, SPAN)

    expected = computed()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = computed()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


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
def test_the_delta_rule_is_that_of_transformers(heads: int, key_heads: int, key_size: int, value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    bounds = [0, 4, 5, 8]
    states = [draw(1, heads, key_size, value_size) for _ in range(3)]
    query, key, value = draw(8, key_heads, key_size), draw(8, key_heads, key_size) / 8, draw(8, heads, value_size)
    rate, decay = draw(2, 8, heads).sigmoid()
    held = [each.clone() for each in states]
    output, after = run_delta_rule(states, bounds, query, key, value, decay, rate, scaling=key_size**-0.5)
    for state, new, start, end in zip(states, after, bounds, bounds[1:], strict=False):
        own = slice(start, end)
        expected, expected_state = torch_recurrent_gated_delta_rule(
            *(each[None, own] for each in (query, key, value)), decay[None, own].log(), rate[None, own],
            initial_state=state, output_final_state=True,
        )  # fmt: skip
        torch.testing.assert_close(output[own], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(new, expected_state, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, states, held))
    wide = decay.unsqueeze(-1).expand(-1, -1, key_size).contiguous()
    again, after_wide = run_delta_rule(states, bounds, query, key, value, wide, rate, scaling=key_size**-0.5)
    assert torch.equal(again, output)
    assert all(map(torch.equal, after_wide, after))
    # Token by token, the bits are those of the whole text.
    for number in range(4):
        one = slice(number, number + 1)
        part, states[:1] = run_delta_rule(
            states[:1], [0, 1], query[one], key[one], value[one], decay[one], rate[one], scaling=key_size**-0.5
        )
        assert torch.equal(part, output[one])
    assert torch.equal(states[0], after[0])


@pytest.mark.parametrize("heads, key_heads, key_size, value_size", [(4, 2, 16, 24), (2, 1, 256, 64)])
def test_a_state_space_is_that_of_transformers(heads: int, key_heads: int, key_size: int, value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    bounds = [0, 70, 71]
    states = [draw(1, heads, value_size, key_size) for _ in range(2)]
    query, key, value = draw(71, key_heads, key_size), draw(71, key_heads, key_size), draw(71, heads, value_size)
    lengths, factor = draw(71, heads).sigmoid(), -draw(heads).exp()
    output, after = run_state_space(states, bounds, query, key, value * lengths.unsqueeze(-1), (lengths * factor).exp())
    for state, new, start, end in zip(states, after, bounds, bounds[1:], strict=False):
        own = slice(start, end)
        expected, expected_state = mamba2_chunk_scan(
            value[None, own],
            lengths[None, own],
            factor,
            key[None, own],
            query[None, own],
            64,
            initial_states=state,
            return_final_states=True,
        )
        torch.testing.assert_close(output[own], expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(new, expected_state, rtol=1e-4, atol=1e-4)
