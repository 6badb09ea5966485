"""Packed checkpoints are the models that their formats' own libraries expand them to."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from corolla.chassis.weight_formats import weight_format
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import open_tensors
from corolla.models.edges import load_edges
from corolla.models.loading import LOADING
from corolla.models.quantized import tensors
from corolla.models.quantized.description import Quantization, Scheme, quantization_of
from corolla.models.quantized.groups import num_words, unpacked
from corolla.models.quantized.tensors import packed_weights
from corolla.models.span_model import load_span, weight_types
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.quantized_checkpoints import FORMATS, compressed_scales, gptq, make_packed_checkpoint
from tests.tiers import quick

TOKEN_IDS = list(range(5, 45))
CHAINS = ([Span(0, 4)], [Span(0, 1), Span(1, 4)], [Span(0, 1), Span(1, 3), Span(3, 4)])


def logits(folder: Path, spans: list[Span]) -> torch.Tensor:
    checkpoint = Checkpoint.from_pretrained(str(folder))
    edges = load_edges(checkpoint, dtype=torch.float32)
    positions = torch.arange(len(TOKEN_IDS))
    hidden = edges.embed(torch.tensor(TOKEN_IDS), positions)[None]
    for span in spans:
        hidden = load_span(checkpoint, span, dtype=torch.float32).forward(hidden, positions[None])
    return edges.head(hidden[0])


def unsplit(folder: Path) -> Any:
    library: Any = AutoModelForCausalLM
    with LOADING:
        return library.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def unsplit_logits(folder: Path) -> torch.Tensor:
    found: torch.Tensor = unsplit(folder)(torch.tensor([TOKEN_IDS])).logits[0]
    return found


def assert_equal(packed: Path, expanded: Path) -> None:
    expected = unsplit_logits(expanded)
    assert not torch.equal(expected, unsplit_logits(packed.parent / "source"))
    for spans in CHAINS:
        assert torch.equal(logits(packed, spans), expected)


@pytest.mark.parametrize(
    "name, file, description",
    [
        ("fp8-outputs", "hf_quant_config.json", {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}),
        pytest.param("gptq", "quantize_config.json", {"bits": 4, "group_size": 32}, marks=pytest.mark.kind),
        pytest.param("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32}, marks=pytest.mark.kind),
        pytest.param("w8a8", "quantize_config.json", None, marks=pytest.mark.kind),
        pytest.param(
            "fp8-outputs", "config.json", {"quant_method": "modelopt", "quant_algo": "FP8"}, marks=pytest.mark.kind
        ),
    ],
)
def test_a_description_may_lie_in_a_file_of_its_own(
    tmp_path: Path, name: str, file: str, description: dict[str, Any] | None
) -> None:
    """None: what `config.json` said."""
    packed, expanded = make_packed_checkpoint("llama", tmp_path, FORMATS[name]())
    config = json.loads((packed / "config.json").read_text())
    own = config.pop("quantization_config")
    if file == "config.json":
        config["quantization_config"] = description
    else:
        (packed / file).write_text(json.dumps(description or own))
    (packed / "config.json").write_text(json.dumps(config))
    assert_equal(packed, expanded)


# One of each way in which numbers and scales are stored; `packed/test_groups.py` expands floats of four bits, too.
KINDS = (
    "gptq", "auto-round-gptq", "w4a16-asymmetric", "w8a16", "w8a8", "ct-fp8-blocks", "ct-mxfp8", "bnb-int8", "bnb-nf4",
)  # fmt: skip


@pytest.mark.parametrize("name", quick(FORMATS, "awq", "fp8-blocks", kinds=KINDS))
def test_a_chain_equals_the_expanded_model(tmp_path: Path, name: str) -> None:
    assert_equal(*make_packed_checkpoint("llama", tmp_path, FORMATS[name]()))


@pytest.mark.full
def test_symmetric_zero_points_may_be_stored_as_they_are(tmp_path: Path) -> None:
    """Some writers name the first layout of GPTQ, and store zero points as the second does."""
    made = gptq(layout="gptq_v2", is_symmetric=True)
    made = dataclasses.replace(made, config={**made.config, "checkpoint_format": "gptq"})
    assert_equal(*make_packed_checkpoint("llama", tmp_path, made))


@pytest.mark.parametrize("name", quick(["fp8-blocks", "ct-mxfp4", "bnb-nf4"], "fp8-blocks"))
def test_experts_are_expanded(tmp_path: Path, name: str) -> None:
    assert_equal(*make_packed_checkpoint("qwen3_moe", tmp_path, FORMATS[name]()))


@pytest.mark.parametrize("name", quick(["gptq", "awq", "fp8-blocks", "w4a16", "bnb-int8"], "gptq"))
def test_the_head_may_be_packed_and_modules_may_be_left_as_they_are(tmp_path: Path, name: str) -> None:
    plain = ("layers.1.mlp.", "self_attn.k_proj")
    assert_equal(*make_packed_checkpoint("qwen2", tmp_path, FORMATS[name](), plain=plain, with_head=True))


@pytest.mark.parametrize("name", quick(["gptq", "fp8-blocks", "w8a8"], "gptq"))
def test_a_tied_head_has_the_embedding(tmp_path: Path, name: str) -> None:
    assert_equal(*make_packed_checkpoint("llama", tmp_path, FORMATS[name](), changes={"tie_word_embeddings": True}))


@pytest.mark.parametrize(
    "group",
    [
        {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
        {"weights": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}},
        {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        },
        {
            "weights": {"num_bits": 8, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
        },
    ],
)
def test_a_model_that_compressed_tensors_saved_is_what_it_expands(tmp_path: Path, group: dict[str, Any]) -> None:
    """Some modules are left out by name, some by a regular expression."""
    source = make_tiny_checkpoint("llama", tmp_path / "source", num_blocks=4)
    model = unsplit(source)
    other = {"targets": [r"re:.*down_proj$"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups = {"group_0": {**group, "targets": [r"re:.*(q|k|v|o|gate|up)_proj$"]}, "group_1": other}
    ignore = ["lm_head", r"re:.*layers\.1\.mlp.*"]
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            for name, values in compressed_scales(module.weight.data, scheme.weights).items():
                getattr(module, name).data.copy_(values)
    library = ModelCompressor.from_pretrained_model(model)
    library.compress_model(model)
    model.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    library.update_config(tmp_path / "packed")
    library.decompress_model(model)
    expanded = unsplit(source)
    weights = model.state_dict()
    expanded.load_state_dict({name: weights[name] for name in expanded.state_dict()})
    expanded.save_pretrained(tmp_path / "expanded")
    assert "weight_scale" in (tmp_path / "packed" / "model.safetensors.index.json").read_text()
    assert_equal(tmp_path / "packed", tmp_path / "expanded")


@pytest.mark.parametrize("block", [(40, 48), (64, 96), (7, 11)])
def test_blocks_need_not_divide_a_weight(tmp_path: Path, block: tuple[int, int]) -> None:
    """DeepSeek's models have such weights; transformers' own functions take only blocks that do divide them."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, 96, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-64 // block[0]), -(-96 // block[1]), generator=generator) + 0.5
    expected = numbers.float()
    for row in range(64):
        for column in range(96):
            expected[row, column] *= scales[row // block[0], column // block[1]]
    save_file({"m.weight": numbers, "m.weight_scale_inv": scales}, tmp_path / "file")
    names = {name: name for name in ("m.weight", "m.weight_scale_inv")}
    with open_tensors(dict.fromkeys(names, tmp_path / "file"), names) as stored:
        weights = packed_weights(Quantization("fp8", (Scheme(8, block=block),)), stored)
        assert torch.equal(weights["m.weight"][...], expected)


def test_experts_in_one_tensor_are_expanded_as_transformers_does(tmp_path: Path) -> None:
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    holder = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(32, 32), scale_fmt="float"))
    quantiser: Any = Fp8Quantize(holder)
    parts = quantiser.convert({"experts.gate_up_proj": weight})
    expand: Any = Fp8Dequantize(holder)
    (expected,) = expand.convert(parts)["experts.gate_up_proj"]
    save_file(parts, tmp_path / "file")
    with open_tensors(dict.fromkeys(parts, tmp_path / "file"), {name: name for name in parts}) as stored:
        weights = packed_weights(Quantization("fp8", (Scheme(8, block=(32, 32)),)), stored)
        assert list(weights) == ["experts.gate_up_proj"]
        assert torch.equal(weights["experts.gate_up_proj"][...], expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_any_bits_are_taken_out_of_words(bits: int) -> None:
    numbers = torch.randint(0, 2**bits, (3, 77), generator=torch.Generator().manual_seed(bits))
    words = []
    for row in numbers.tolist():
        whole = sum(number << (place * bits) for place, number in enumerate(row))
        words.append([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(num_words(77, bits))])
    stored = torch.tensor(words).sub(1 << 31).int().bitwise_xor(-(1 << 31))
    assert torch.equal(unpacked(stored, bits, 77), numbers.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_once_to_the_served_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    packed, expanded = (
        Checkpoint.from_pretrained(str(folder))
        for folder in make_packed_checkpoint("llama", tmp_path, FORMATS["awq"]())
    )
    own, reference = (load_span(each, Span(1, 3), dtype=dtype) for each in (packed, expanded))
    for module, other in zip(own.modules(), reference.modules(), strict=True):
        for weight, expected in zip(module.parameters(False), other.parameters(False), strict=True):
            assert weight.dtype == dtype
            assert torch.equal(weight, expected)


@pytest.mark.kind
def test_formats_of_one_model_have_different_fingerprints(tmp_path: Path) -> None:
    folders = [make_packed_checkpoint("llama", tmp_path / name, make()) for name, make in FORMATS.items()]
    checkpoints = [Checkpoint.from_pretrained(str(folder)) for pair in folders for folder in pair]
    packed = {each.fingerprint("float32") for each in checkpoints[::2]}
    assert len(packed) == len(FORMATS)
    assert packed.isdisjoint(each.fingerprint("float32") for each in checkpoints[1::2])


def test_one_file_read_in_two_ways_has_two_fingerprints(tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS["gptq"]())
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    fingerprints = set()
    for layout in ("gptq", "gptq_v2"):
        stored["quantization_config"]["checkpoint_format"] = layout
        path.write_text(json.dumps(stored))
        fingerprints.add(Checkpoint.from_pretrained(str(folder)).fingerprint("float32"))
    assert len(fingerprints) == 2


def test_what_is_expanded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, expanded = make_packed_checkpoint("llama", tmp_path, FORMATS["awq"]())
    checkpoint = Checkpoint.from_pretrained(str(folder))
    with caplog.at_level(logging.INFO, "corolla.models.packed.choice"):
        load_span(checkpoint, Span(0, 2), dtype=torch.bfloat16)
    (record,) = caplog.records
    assert record.message == "expanding weights while reading them"
    assert (record.method, record.dtype, record.weights) == ("awq", "bfloat16", 14)  # type: ignore[attr-defined]
    for quantization, said in (("none", "bfloat16: awq expanded"), ("int8", "int8/bf16: awq expanded")):
        assert weight_format("bfloat16", quantization, *weight_types(checkpoint, quantization)) == said
    assert weight_types(Checkpoint.from_pretrained(str(expanded)), "none") == ([], [])


@pytest.mark.parametrize("name", FORMATS)
def test_large_weights_are_expanded_in_several_pieces(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "NUMBERS_AT_ONCE", 1000)
    made = FORMATS[name]()
    assert made.pack is not None
    parts, expected = made.pack(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
    parts = {f"m.{ending}": part.contiguous() for ending, part in parts.items()}
    save_file(parts, tmp_path / "file")
    quantization = quantization_of({"quantization_config": made.config})
    assert quantization is not None
    with open_tensors(dict.fromkeys(parts, tmp_path / "file"), {part: part for part in parts}) as stored:
        assert torch.equal(packed_weights(quantization, stored)["m.weight"][...], expected)
