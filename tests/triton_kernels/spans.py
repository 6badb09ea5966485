"""Spans of tiny models by Triton kernels: chains give transformers' tokens, and no row depends on the batch."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.cache.codecs import CODECS
from corolla.cache.store import SessionCache
from corolla.compute import graph_choice, triton_blocks
from corolla.compute.attention import paged_triton
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.compute.triton_blocks import TritonBlocks
from corolla.kernels.triton import launches
from corolla.kernels.triton.packed_launches import multiply_packed
from corolla.kernels.triton.variants import Grid, Variant
from corolla.models import edges as edges_module
from corolla.models import linear, span_model
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.edges import Edges, load_edges
from corolla.models.invariant import InvariantProduct, triton_product
from corolla.models.linear import DenseLinear
from corolla.models.packed import modules
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint, mxfp4
from tests.reference import Unsplit
from tests.tiers import quick
from tests.triton_kernels import DEVICE, FAMILIES, QUICK_FAMILY
from tests.triton_kernels.ordered_products import install
from tests.triton_kernels.recorded_launches import record

PAGE_TOKENS = 8
PROMPT = [7, 3, 9, 250, 31, 4, 4, 80, 12, 9, 77, 61, 5, 200, 18, 33, 2, 90, 41]
NUM_TOKENS = 5
# Their features: norms of heads, multipliers, a dense block among mixtures of experts with a shared one, joined
# projections, norms of outputs and bounded scores, GELU, Gemma's norm and a rotary table for each kind of layer, norms
# of outputs only and of all heads together, rotation in layers with a window only and gates of attention, parallel MLPs
# and LayerNorm with a weight for each head, biases beside LayerNorm and MLPs without a gate, sinks and gates between
# what they open, norms after the rotation, factors of queries, activations that torch computes.
# A part of each head is rotated: of nemotron by halves, of glm in pairs.
# Blocks of both kinds are in one span, and another begins in the midst of the model.
SPANS = (Span(0, 2), Span(2, 3))


@pytest.fixture(autouse=True, scope="module")
def products() -> Iterator[None]:
    """Multiplies by the Triton kernel everywhere: the trial of all sizes would take minutes here."""

    def take_triton(layers: Iterable[DenseLinear], **_options: Any) -> None:
        for layer in layers:
            # References stay on the CPU.
            if layer.weight.device.type == DEVICE:
                layer.invariant = InvariantProduct("triton", triton_product, (1,))

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        for module in (span_model, edges_module, linear):
            patch.setattr(module, "choose_products", take_triton)
        # `mixtures.py` tries grouped products with more rows.
        patch.setattr(launches, "row_counts", lambda: (2,))
        yield


def make_runner(checkpoint: Checkpoint, span: Span, quantization: str = "none", **options: Any) -> SpanRunner:
    runner = SpanRunner(
        load_span(checkpoint, span, dtype=torch.float32, device=DEVICE, quantization=quantization),
        # No adapters, whose kernels take seconds for their trial here.
        **{"num_pages": 60, "page_tokens": PAGE_TOKENS, "attention": "triton", "max_stack_bytes": 0, **options},
    )
    assert runner.kernel_choices.blocks == "triton"
    # MXFP4 is of experts alone.
    has_plain = quantization == "none" or checkpoint.config.model_type == "gpt_oss"
    assert set(runner.kernel_choices.products.values()) == ({"triton"} if has_plain else set())
    return runner


def num_packed_experts(runner: SpanRunner) -> int:
    """How many weights of experts stay packed."""
    return sum(isinstance(module, modules.PackedExpertWeights) for module in runner.model.modules())


def make_checkpoint(folder: Path, family: str) -> Checkpoint:
    made = make_tiny_checkpoint(family, folder / family, num_blocks=SPANS[-1].end)
    return Checkpoint.from_pretrained(str(made))


class Chain:
    """Servers of a whole model, without the network between them."""

    def __init__(self, checkpoint: Checkpoint, quantization: str = "none") -> None:
        self._runners = [make_runner(checkpoint, span, quantization) for span in SPANS]
        self._edges: Edges = load_edges(checkpoint, dtype=torch.float32, device=DEVICE)
        self._edges.choose_products()
        assert set(self._edges.product_ways.values()) == {"triton"}

    @property
    def num_packed_experts(self) -> int:
        return sum(map(num_packed_experts, self._runners))

    def answer(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        caches = [runner.new_cache() for runner in self._runners]
        for cache in caches:
            cache.reserve(len(prompt) + num_tokens)
        chosen: list[int] = []
        while len(chosen) < num_tokens:
            new = chosen[-1:] or list(prompt)
            position = caches[0].num_tokens
            ids = torch.tensor(new, device=DEVICE)
            hidden = self._edges.embed(ids, torch.arange(position, position + len(new), device=DEVICE))
            for runner, cache in zip(self._runners, caches, strict=True):
                hidden = runner.forward([RowWork(cache, position, len(new))], hidden, runner.span)
            chosen.append(int(self._edges.head(hidden[-1:]).argmax()))
        return chosen


@pytest.mark.parametrize("family", quick(FAMILIES, QUICK_FAMILY))
def test_a_chain_gives_the_tokens_of_transformers(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path, family)
    expected = Unsplit(tmp_path / family).generate(PROMPT, NUM_TOKENS, ignore_eos=True).token_ids
    assert Chain(checkpoint).answer(PROMPT, NUM_TOKENS) == expected


@pytest.mark.full
@pytest.mark.parametrize("num_others, short_step, counts", [(0, 4, {8}), (1, 256, {8}), (1, 4, {6})])
def test_products_that_pad_their_rows_get_a_step_that_is_padded_once(
    tmp_path: Path, num_others: int, short_step: int, counts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits stay. Next to products that do not pad, only short steps are padded."""
    checkpoint = make_checkpoint(tmp_path, QUICK_FAMILY)
    runner = make_runner(checkpoint, Span(0, 1))
    assert runner.model.fused is not None
    hidden = torch.randn(6, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found: set[int] = set()

    class Counted(InvariantProduct):
        """Notes how many rows its calls have."""

        def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            found.add(len(rows))
            return super().__call__(rows, weight, bias)

    def output() -> torch.Tensor:
        caches = [runner.new_cache() for _ in range(2)]
        for cache in caches:
            cache.reserve(5)
        return runner.forward([RowWork(caches[0], 0, 1), RowWork(caches[1], 0, 5)], hidden, runner.span)

    expected = output()
    linears = runner.model.fused.linears
    for linear_layer in linears[num_others:]:
        linear_layer.invariant = Counted("ladder", triton_product, (1, 2, 4, 8, 16))
    monkeypatch.setattr(triton_blocks, "SHORT_STEP", short_step)
    runner.blocks = TritonBlocks(runner.model.fused)
    # Memory that is not written holds NaN.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(output(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == counts


@pytest.mark.full
@pytest.mark.parametrize("family", ["laguna", "gpt_neox", "granite_swa"])
def test_the_familys_own_code_attends_by_the_kernels(tmp_path: Path, family: str) -> None:
    """Windows, halves of heads that are not rotated, sinks: transformers' modules, our attention and products."""
    checkpoint, span = make_checkpoint(tmp_path, family), Span(1, 3)
    runner = SpanRunner(
        load_span(checkpoint, span, dtype=torch.float32, device=DEVICE),
        num_pages=60, page_tokens=PAGE_TOKENS, attention="triton",
    )  # fmt: skip
    assert (runner.kernel_choices.attention, runner.kernel_choices.blocks) == ("triton", "family")
    reference = SpanRunner(
        load_span(checkpoint, span, dtype=torch.float32, device=DEVICE),
        num_pages=60,
        page_tokens=PAGE_TOKENS,
        attention="sdpa",
    )
    hidden = torch.randn(21, runner.model.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = []
    for each in (runner, reference):
        cache = each.new_cache()
        cache.reserve(21)
        parts = torch.split(hidden, [18, 1, 2])
        outputs.append(torch.cat([each.forward([RowWork(cache, cache.num_tokens, len(p))], p, span) for p in parts]))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def quantised(folder: Path, kind: str) -> tuple[Checkpoint, str]:
    """A checkpoint, and the quantisation with which its weights are of a kind: a type of GGUF, int8, int4 or FP8."""
    if kind in ("int8", "int4"):
        return make_checkpoint(folder, "llama"), kind
    family, _, kind = kind.rpartition(" ")
    if kind in FORMATS:
        made = make_packed_checkpoint(family or "llama", folder, FORMATS[kind](), num_blocks=SPANS[-1].end)[0]
    else:
        made = make_tiny_gguf(family or "llama", folder, kind=kind, num_blocks=SPANS[-1].end)[1]
    return Checkpoint.from_pretrained(str(made)), "packed"


def take_packed_product(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter multiply by the product that packed layers and experts take by themselves on a GPU."""
    if DEVICE == "cpu":
        patch.setattr(modules, "multiplied", multiply_packed)


@pytest.mark.full
def test_a_chain_of_packed_experts_gives_the_tokens_of_transformers_with_expanded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_packed_checkpoint("gpt_oss", tmp_path, mxfp4(), num_blocks=SPANS[-1].end)
    num_tokens = 3
    expected = Unsplit(made[1]).generate(PROMPT, num_tokens, ignore_eos=True).token_ids
    take_packed_product(monkeypatch)
    chain = Chain(Checkpoint.from_pretrained(str(made[0])), "packed")
    assert chain.num_packed_experts == 2 * SPANS[-1].end
    assert chain.answer(PROMPT, num_tokens) == expected


@pytest.mark.full
@pytest.mark.parametrize("kind", ["Q4_0", "int8", "int4", "fp8-blocks", "qwen3_moe Q4_0"])
def test_packed_weights_run_by_the_kernels_and_in_replayed_steps(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COROLLA_CACHE", str(tmp_path / "cache"))
    checkpoint, quantization = quantised(tmp_path, kind)
    span = Span(1, 2)
    options: dict[str, Any] = {"num_pages": 60, "page_tokens": PAGE_TOKENS, "max_stack_bytes": 0}
    # A processor takes the expanded numbers.
    plain = load_span(
        checkpoint, span, dtype=torch.float32, quantization="none" if quantization == "packed" else quantization
    )
    with torch.device("cpu"):
        reference = SpanRunner(plain, attention="sdpa", **options)
    for layer in plain.packed_layers:
        layer.expand(torch.float32)
    take_packed_product(monkeypatch)
    packed = load_span(checkpoint, span, dtype=torch.float32, device=DEVICE, quantization=quantization)
    runner = SpanRunner(packed, attention="triton", has_scratch_page=True, **options)
    assert runner.kernel_choices.blocks == "triton"
    assert num_packed_experts(runner) == (2 if "moe" in kind else 0)
    hidden = torch.randn(21, runner.model.hidden_size, generator=torch.Generator().manual_seed(0))

    def outputs(of: SpanRunner, sizes: list[int]) -> torch.Tensor:
        cache = of.new_cache()
        cache.allocate(21)
        parts = torch.split(hidden, sizes)
        found = [of.forward([RowWork(cache, cache.num_tokens, len(p))], p, span).to(DEVICE) for p in parts]
        cache.clear()
        return torch.cat(found)

    whole = outputs(runner, [5, 16])
    torch.testing.assert_close(whole, outputs(reference, [21]), rtol=1e-4, atol=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_choice, "SIZES", (1,))
        graph_choice.choose_graphs(runner, lambda: record if DEVICE == "cpu" else CudaCapture(torch.device(DEVICE)))
    assert runner.decode_graphs is not None
    num_replays = runner.decode_graphs.num_replays
    assert torch.equal(outputs(runner, [18, 1, 2]), whole)
    assert runner.decode_graphs.num_replays == num_replays + 1


@pytest.mark.parametrize("kind", CODECS)
def test_blocks_that_store_other_codes_than_the_codec_are_not_taken(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = CODECS[kind](torch.float32).encode
    monkeypatch.setattr(CODECS[kind], "encode", lambda _codec, numbers: encode(numbers * 1.001))
    span = load_span(make_checkpoint(tmp_path, "llama"), Span(0, 1), dtype=torch.float32, device=DEVICE)
    runner = SpanRunner(span, num_pages=4, page_tokens=PAGE_TOKENS, attention="triton", kv_cache_dtype=kind)
    assert (runner.kernel_choices.attention, runner.kernel_choices.blocks) == ("triton", "fused")


@pytest.mark.parametrize(
    "case",
    quick(
        [("mistral", "auto"), ("mixtral", "auto"), ("olmo3", "auto"), ("mistral", "fp8"), ("qwen3", "int8")],
        ("mistral", "auto"),
    ),
)
def test_replayed_steps_have_the_bits_of_prompts(tmp_path: Path, case: tuple[str, str]) -> None:
    """Windows, recorded steps and other sessions leave a token the bits that it has as part of a prompt."""
    family, kind = case
    checkpoint = make_checkpoint(tmp_path, family)
    # This family's second block has another rotary table, and no window.
    span = Span(0, 2 if family == "olmo3" else 1)
    runner = make_runner(checkpoint, span, has_scratch_page=True, max_step_tokens=32, kv_cache_dtype=kind)
    runner.warm_up()
    num_tokens = 3 * PAGE_TOKENS + 3
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(num_tokens, runner.model.hidden_size, generator=generator) for _ in range(2)]

    def opened() -> SessionCache:
        cache = runner.new_cache()
        cache.allocate(num_tokens)
        return cache

    whole = []
    for text in texts:
        cache = opened()
        parts = torch.split(text, [20, num_tokens - 20])
        whole.append(torch.cat([runner.forward([RowWork(cache, cache.num_tokens, len(p))], p, span) for p in parts]))
        cache.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_choice, "SIZES", (1, 2))
        graph_choice.choose_graphs(runner, lambda: record if DEVICE == "cpu" else CudaCapture(torch.device(DEVICE)))
    assert runner.decode_graphs is not None
    caches = [opened() for _ in texts]
    first = PAGE_TOKENS - 2
    for cache, text in zip(caches, texts, strict=True):
        runner.forward([RowWork(cache, 0, first)], text[:first], span)
    num_replays = runner.decode_graphs.num_replays
    for position in range(first, num_tokens):
        if position % 3:
            rows = [RowWork(cache, position, 1) for cache in caches]
            found = runner.forward(rows, torch.stack([text[position] for text in texts]), span)
        else:
            found = torch.cat(
                [runner.forward([RowWork(cache, position, 1)], text[position : position + 1], span)
                 for cache, text in zip(caches, texts, strict=True)]
            )  # fmt: skip
        assert torch.equal(found, torch.stack([outputs[position] for outputs in whole]))
    assert runner.decode_graphs.num_replays > num_replays + num_tokens - first - 1


def test_short_rows_before_a_chunk_have_the_kernel_of_single_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    span = Span(0, 1)
    runner = make_runner(make_checkpoint(tmp_path, "mistral"), span)
    num_tokens = 2 * PAGE_TOKENS + 3
    text = torch.randn(num_tokens, runner.model.hidden_size, generator=torch.Generator().manual_seed(0))
    caches = [runner.new_cache() for _ in range(3)]
    for cache in caches:
        cache.allocate(num_tokens)
    whole = runner.forward([RowWork(caches[0], 0, num_tokens)], text, span)
    ranges = [(num_tokens - 1, num_tokens), (num_tokens - 4, num_tokens - 1), (1, 11)]
    for cache, (begin, _) in zip(caches, ranges, strict=True):
        runner.forward([RowWork(cache, 0, begin)], text[:begin], span)
    launched: list[tuple[str, int]] = []

    def launch(of: Variant, grid: Grid, *arguments: Any) -> None:
        if of.kernel.__name__ in ("attend_pages", "attend_chunks"):
            launched.append((of.kernel.__name__, grid[-1]))
        launch_it(of, grid, *arguments)

    launch_it = launches.launch
    monkeypatch.setattr(launches, "launch", launch)

    def run(order: Sequence[int]) -> list[tuple[str, int]]:
        launched.clear()
        rows = [RowWork(caches[each], ranges[each][0], ranges[each][1] - ranges[each][0]) for each in order]
        parts = [slice(*ranges[each]) for each in order]
        found = runner.forward(rows, torch.cat([text[part] for part in parts]), span)
        assert torch.equal(found, torch.cat([whole[part] for part in parts]))
        return list(launched)

    assert run([0, 1, 2]) == [("attend_pages", 1 + 3), ("attend_chunks", 1)]
    # Rows keep their order: one that follows a chunk is computed with it.
    assert run([1, 2, 0]) == [("attend_pages", 3), ("attend_chunks", 2)]
    assert run([2, 0]) == [("attend_chunks", 2)]
    # The results of all pages of so many keys would take too much memory.
    monkeypatch.setattr(paged_triton, "MOST_KEYS_OF_SHORT_ROWS", num_tokens)
    assert run([0, 1, 2]) == [("attend_pages", 1), ("attend_chunks", 2)]
