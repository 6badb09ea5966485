"""Compiled blocks give the numbers of the modules that they stand for, whatever runs beside a row."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.cache.store import SessionCache
from corolla.compute import compiled_blocks
from corolla.compute.base import RowWork
from corolla.compute.compiled_blocks import choose_compiled_blocks, why_unsupported
from corolla.compute.fused_blocks import FusedBlocks
from corolla.compute.span_runner import SpanRunner
from corolla.models.adapters.loading import load_adapter
from corolla.models.adapters.products import SpanAdapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.fused import FusedSpan, GatedMlp
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint

NUM_BLOCKS = 4
WHOLE = Span(0, NUM_BLOCKS)
# Heads of 32 numbers, halves of which are turned together; or halves of their first 32, or neighbours.
HEADS = {"head_dim": 32}
FAMILIES = ("hunyuan_v1_dense", "qwen2", "qwen3", "smollm3", "mistral", "granite", "ernie4_5")
# These families turn 32 of the 64 numbers of a head.
PARTLY = {"glm": {"head_dim": 64}, "glm4_moe": {"head_dim": 64}}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
# New tokens of three sessions, step after step: next tokens, several at once, and chunks.
STEPS = ((70, 3, 1), (1, 1, 9), (8, 40, 1), (1, 1, 1), (2, 1, 300))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checkpoint_of(family: str, folder: Path) -> Checkpoint:
    return Checkpoint.from_pretrained(
        str(make_tiny_checkpoint(family, folder, num_blocks=NUM_BLOCKS, config_changes=PARTLY.get(family, HEADS)))
    )


def use(runner: SpanRunner, *, is_compiled: bool) -> None:
    assert runner.blocks.name == "compiled"
    assert runner.model.fused is not None
    if not is_compiled:
        runner.blocks = FusedBlocks(runner.model.fused, runner.stacks)


def runner_of(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, *, is_compiled: bool = True) -> SpanRunner:
    runner = SpanRunner(
        load_span(checkpoint, WHOLE, dtype=dtype), num_pages=2000, max_step_tokens=1024, products="panels"
    )
    use(runner, is_compiled=is_compiled)
    return runner


def test_the_choices_of_kernels_are_data(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    compiled = runner_of(checkpoint).kernel_choices
    plain = SpanRunner(
        load_span(checkpoint, WHOLE, dtype=torch.float32), num_pages=4, attention="sdpa", is_fused=False
    ).kernel_choices
    assert (compiled.attention, compiled.blocks, plain.attention, plain.blocks) == (
        "compiled", "compiled", "sdpa", "family",
    )  # fmt: skip
    assert set(compiled.products.values()) == {"panels"}
    shapes = {f"{layer.weight.shape[0]}x{layer.weight.shape[1]}" for layer in runner_of(checkpoint).model.linears}
    assert compiled.products.keys() == shapes
    shape = min(shapes)
    assert compiled.choices()[f"product {shape}"] == "panels"
    assert len(compiled.choices()) == 3 + len(shapes)


def caches_of(runner: SpanRunner, count: int) -> list[SessionCache]:
    caches = [runner.new_cache() for _ in range(count)]
    for cache in caches:
        cache.reserve(400)
    return caches


def inputs(runner: SpanRunner, steps: tuple[tuple[int, ...], ...] = STEPS) -> list[list[Tensor]]:
    """The inputs of each step, for each session."""
    generator = torch.Generator().manual_seed(0)
    size, dtype = runner.model.hidden_size, runner.model.dtype
    return [[torch.randn(count, size, generator=generator).to(dtype) for count in step] for step in steps]


def run(
    runner: SpanRunner, steps: list[list[Tensor]], adapters: list[SpanAdapter | None] | None = None
) -> list[Tensor]:
    """What each step gave, all sessions in one batch."""
    caches = caches_of(runner, len(steps[0]))
    of_rows: list[SpanAdapter | None] = adapters or [None] * len(caches)
    outputs = []
    for step in steps:
        rows = [
            RowWork(cache, cache.num_tokens, len(hidden), adapter=adapter)
            for cache, hidden, adapter in zip(caches, step, of_rows, strict=True)
        ]
        outputs.append(runner.forward(rows, torch.cat(step), WHOLE))
    return outputs


def assert_close(given: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(given, expected, strict=True):
        assert float((one.float() - other.float()).abs().max() / other.float().abs().max()) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    "dtype, family",
    [
        *itertools.product([torch.float32], (*FAMILIES, "ministral3", "glm")),
        *itertools.product([torch.bfloat16], ("hunyuan_v1_dense", "qwen2", "ernie4_5")),
        *(
            pytest.param(torch.bfloat16, family, marks=pytest.mark.full)
            for family in ("qwen3", "smollm3", "mistral", "granite")
        ),
    ],
)
def test_blocks_equal_their_modules(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path)
    runner, modules = runner_of(checkpoint, dtype), runner_of(checkpoint, dtype, is_compiled=False)
    steps = inputs(runner)
    torch.set_num_threads(1)
    expected, alone = run(modules, steps), run(runner, steps)
    assert_close(alone, expected, dtype)
    torch.set_num_threads(2)
    for one, other in zip(run(runner, steps), alone, strict=True):
        assert torch.equal(one, other)


def test_a_mixture_stands_between_two_calls(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen3_moe", tmp_path)
    runner, modules = runner_of(checkpoint), runner_of(checkpoint, is_compiled=False)
    steps = inputs(runner)
    base = run(runner, steps)
    assert_close(base, run(modules, steps), torch.float32)
    # Modules run rows with adapters, and no others: neither changes what runs the other.
    make_adapter(tmp_path, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    runner.model.take_adapters()
    adapter = load_adapter(tmp_path / "adapter", runner.model, NUM_BLOCKS)
    mixed, alone = run(runner, steps, [None, adapter, None]), run(runner, [[each[1]] for each in steps], [adapter])
    for counts, output, of_base, of_adapter in zip(STEPS, mixed, base, alone, strict=True):
        first, own, last = torch.split(output, list(counts))
        before, without, after = torch.split(of_base, list(counts))
        assert torch.equal(first, before)
        assert torch.equal(own, of_adapter)
        assert torch.equal(last, after)
        assert not torch.allclose(own, without, atol=1e-3)


def test_halves_of_a_part_of_a_head_are_rotated(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("glm4_moe", tmp_path)
    runner, modules = runner_of(checkpoint), runner_of(checkpoint, is_compiled=False)
    steps = inputs(runner)
    assert_close(run(runner, steps), run(modules, steps), torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, tmp_path: Path) -> None:
    runner = runner_of(checkpoint_of("llama", tmp_path), dtype)
    steps = inputs(runner)
    together = run(runner, steps)
    for number in range(len(STEPS[0])):
        alone = run(runner, [[step[number]] for step in steps])
        for output, own, counts in zip(together, alone, STEPS, strict=True):
            start = sum(counts[:number])
            assert torch.equal(output[start : start + counts[number]], own)


def test_some_of_the_blocks_run_by_themselves(tmp_path: Path) -> None:
    runner = runner_of(checkpoint_of("qwen3", tmp_path))
    hidden = inputs(runner, ((20,),))[0][0]
    (cache,) = caches_of(runner, 1)
    whole = runner.forward([RowWork(cache, 0, 20)], hidden, WHOLE)
    for spans in ((Span(0, 1), Span(1, 4)), (Span(0, 3), Span(3, 4))):
        given = hidden
        for span in spans:
            (cache,) = caches_of(runner, 1)
            given = runner.forward([RowWork(cache, 0, 20)], given, span)
        assert torch.equal(given, whole)


def test_numbers_that_are_none_stay_in_their_row(tmp_path: Path) -> None:
    runner = runner_of(checkpoint_of("llama", tmp_path))
    steps = inputs(runner, ((5, 20, 1),))
    sound = run(runner, steps)[0]
    steps[0][1][3, 7] = torch.nan
    rows = [RowWork(cache, 0, len(hidden)) for cache, hidden in zip(caches_of(runner, 3), steps[0], strict=True)]
    launched = runner.launch(rows, torch.cat(steps[0]), WHOLE)
    assert runner.finish(launched, range(3), WHOLE) == (True, False, True)
    assert torch.equal(launched.hidden[:5], sound[:5])
    assert torch.equal(launched.hidden[25:], sound[25:])


def test_texts_grow_past_the_first_rotary_table(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    runner, modules = runner_of(checkpoint), runner_of(checkpoint, is_compiled=False)
    outputs = []
    for each in (runner, modules):
        cache = each.new_cache()
        cache.reserve(1100)
        hidden = torch.randn(1100, each.model.hidden_size, generator=torch.Generator().manual_seed(1))
        each.forward([RowWork(cache, 0, 1000)], hidden[:1000], WHOLE)
        outputs.append([each.forward([RowWork(cache, 1000, 100)], hidden[1000:], WHOLE)])
    assert_close(outputs[0], outputs[1], torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_adapters_of_each_row_are_added(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("qwen2", tmp_path / "model")
    kinds: list[dict[str, Any]] = [{"r": 4}, {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}}]
    folders = [
        make_adapter(tmp_path / "model", tmp_path / f"{seed}", seed=seed, **kind) for seed, kind in enumerate(kinds)
    ]
    outputs = []
    for is_compiled in (True, False):
        runner = runner_of(checkpoint, dtype, is_compiled=is_compiled)
        runner.model.take_adapters()
        adapters = [None, *(load_adapter(folder, runner.model, NUM_BLOCKS) for folder in folders)]
        steps = inputs(runner)
        outputs.append(run(runner, steps, adapters))
        base = run(runner, [[step[0]] for step in steps])
        if is_compiled:
            for output, own in zip(outputs[0], base, strict=True):
                assert torch.equal(output[: len(own)], own)
    assert_close(outputs[0], outputs[1], dtype)
    assert not torch.allclose(outputs[0][0], run(runner, steps)[0], atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["Q8_0", "awq"])
def test_packed_weights_are_compiled_too(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    if kind in FORMATS:
        path, _ = make_packed_checkpoint("llama", tmp_path, FORMATS[kind](), changes=HEADS)
    else:
        _, path = make_tiny_gguf("llama", tmp_path, kind=kind, changes=HEADS)
    checkpoint = Checkpoint.from_pretrained(str(path))
    outputs = []
    for is_compiled in (True, False):
        span = load_span(checkpoint, WHOLE, dtype=dtype, quantization="packed")
        runner = SpanRunner(span, num_pages=2000, max_step_tokens=1024, products="panels")
        use(runner, is_compiled=is_compiled)
        outputs.append(run(runner, inputs(runner)))
    assert_close(outputs[0], outputs[1], dtype)


def test_what_no_function_is_made_for_stays_modules(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    for settings in (
        {"kv_cache_dtype": "int8"}, {"page_tokens": 8}, {"attention": "sdpa"}, {"is_fused": False},
        {"products": "library"},
    ):  # fmt: skip
        options: dict[str, Any] = {"num_pages": 2000, "products": "panels", **settings}
        assert SpanRunner(load_span(checkpoint, WHOLE, dtype=torch.float32), **options).blocks.name != "compiled"
    assert SpanRunner(load_span(checkpoint, WHOLE, dtype=torch.float16), num_pages=2000).blocks.name == "fused"
    runner = runner_of(checkpoint)
    span = runner.model.fused
    assert isinstance(span, FusedSpan)
    assert why_unsupported(span, runner.store, torch.float32) is None
    mlp = span.layers[2].mlp
    assert isinstance(mlp, GatedMlp)
    mlp.activation = torch.nn.GELU()
    assert why_unsupported(span, runner.store, torch.float32) == (
        "the activation GELU, or an MLP without a gate, has no function"
    )
    span.layers[1].mlp_output_norm = span.layers[1].mlp_norm
    assert why_unsupported(span, runner.store, torch.float32) == "norms stand elsewhere than before attention and MLP"
    span.layers[3].scaling *= 2
    assert why_unsupported(span, runner.store, torch.float32) == "the heads of its layers differ"


def test_wrong_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(checkpoint_of("llama", tmp_path))
    bits = itertools.repeat(0x3F000000)
    monkeypatch.setattr(compiled_blocks, "float_bits", lambda _: next(bits))
    assert runner.model.fused is not None
    assert (
        choose_compiled_blocks(runner.model.fused, runner.store, runner.backend, torch.float32, runner.stacks) is None
    )
