"""Damaged and hostile packed weights are refused before memory is taken; whatever is not refused is still a weight."""

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from corolla.chassis.errors import CheckpointError
from corolla.kernels.repacking import unpack
from corolla.models.checkpoint import Checkpoint
from corolla.models.chunked_reads import open_tensors
from corolla.models.edges import load_edges
from corolla.models.quantized import tensors
from corolla.models.quantized.description import quantization_of
from corolla.models.quantized.stored_tensors import Unfit
from corolla.models.quantized.tensors import PackedWeight, packed_weights
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.quantized_checkpoints import FORMATS, INDEX, edit_config, make_packed_checkpoint, mxfp4

Parts = dict[str, Tensor]
NAME = "model.layers.0.mlp.up_proj"
# One bit is the least that a number takes.
MOST_NUMBERS_OF_A_BYTE = 8
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bool,
)  # fmt: skip


def parts_of(name: str) -> tuple[Mapping[str, Any], Parts]:
    """A format's configuration, and the parts of one weight of 64 outputs and 96 inputs."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    if name == "mxfp4":
        made = mxfp4()
        assert made.experts is not None
        experts = made.experts(weight.T.expand(2, 96, 64).contiguous())[0]
        return made.config, {f"{NAME}_{ending}": part for ending, part in experts.items()}
    made = FORMATS[name]()
    assert made.pack is not None
    return made.config, {f"{NAME}.{ending}": part for ending, part in made.pack(weight)[0].items()}


ALL = {name: parts_of(name) for name in (*FORMATS, "mxfp4")}


def assert_kept_as_expanded(weight: PackedWeight, expanded: Tensor) -> None:
    """What kernels take as it is has the numbers of what is expanded, all of them finite. Raises Unfit."""
    layout = weight.layout()
    if layout.bits == 4 and layout.is_float:
        rows = (expanded.mT if expanded.dim() == 3 else expanded).flatten(0, -2)
        assert torch.equal(unpack(weight.panels().panels, layout, len(rows)), rows)
        assert bool(rows.isfinite().all())


def opened_and_read(folder: Path, config: Mapping[str, Any], parts: Parts) -> bool:
    """Whether a file of these parts is refused; else what it holds is no more than its bytes bear out, and is read."""
    path = folder / "model.safetensors"
    save_file({name: part.contiguous() for name, part in parts.items()}, path)
    quantization = quantization_of({"quantization_config": config})
    assert quantization is not None
    with open_tensors(dict.fromkeys(parts, path), {name: name for name in parts}) as stored:
        try:
            weights = packed_weights(quantization, stored)
        except CheckpointError:
            return True
        for weight in weights.values():
            if isinstance(weight, PackedWeight):
                assert math.prod(weight.shape) <= MOST_NUMBERS_OF_A_BYTE * path.stat().st_size
                expanded = weight[...]
                assert expanded.shape == weight.shape
                with contextlib.suppress(Unfit):
                    assert_kept_as_expanded(weight, expanded)
    return False


def another_byte(part: Tensor, draw: st.DrawFn) -> Tensor:
    octets = part.contiguous().flatten().view(torch.uint8).clone()
    if len(octets):
        octets[draw(st.integers(0, len(octets) - 1))] = draw(st.integers(0, 255))
    return octets.view(part.dtype).view(part.shape)


def another_type(part: Tensor, draw: st.DrawFn) -> Tensor:
    return part.float().nan_to_num().clamp(-100, 100).to(draw(st.sampled_from(DTYPES)))


def another_shape(part: Tensor, draw: st.DrawFn) -> Tensor:
    shapes = st.lists(st.integers(0, 130), max_size=4).filter(lambda shape: math.prod(shape) <= 1 << 16)
    return torch.zeros(draw(shapes), dtype=part.dtype)


DAMAGE: tuple[Callable[[Tensor, st.DrawFn], Tensor], ...] = (
    another_byte, another_type, another_shape, lambda part, _draw: part[: len(part) // 2] if part.dim() else part,
    lambda part, _draw: part.flatten(), lambda part, _draw: part.T if part.dim() == 2 else part.unsqueeze(0),
    lambda part, _draw: torch.cat([part, part]) if part.dim() else part,
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, name: str) -> Parts:
    parts = dict(ALL[name][1])
    if draw(st.integers(0, 7)) == 0:
        parts.pop(draw(st.sampled_from(sorted(parts))))
    for _ in range(draw(st.integers(1, 2))):
        which = draw(st.sampled_from(sorted(parts)))
        parts[which] = draw(st.sampled_from(DAMAGE))(parts[which], draw)
    return parts


@pytest.mark.parametrize("name", ALL)
def test_damaged_parts_are_refused_or_still_a_weight(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("parts")
    config, parts = ALL[name]
    assert not opened_and_read(folder, config, parts)
    refusals = []

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damaged(name))
    def damage(parts: Parts) -> None:
        refusals.append(opened_and_read(folder, config, parts))

    damage()
    assert sum(refusals) > len(refusals) // 3


SENSELESS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["re:(a+)+$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.data())
def test_whatever_a_configuration_says_it_is_read_or_refused(name: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(ALL[name][0]))
    places: list[Any] = [config]
    for group in config.get("config_groups", {}).values():
        places += [config["config_groups"], group, group["weights"]]
    place = data.draw(st.sampled_from(places))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(SENSELESS)
    try:
        quantization = quantization_of({"quantization_config": config})
    except CheckpointError:
        return
    assert quantization is None or quantization.method in tensors.FORMATS


# --- whole checkpoints, each damaged in one way


def change_part(ending: str, change: Callable[[Tensor], Tensor | None], name: str = NAME) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        shard = folder / weight_map[f"{name}.{ending}"]
        tensors = load_file(shard)
        changed = change(tensors.pop(f"{name}.{ending}"))
        if changed is not None:
            tensors[f"{name}.{ending}"] = changed.contiguous()
        else:
            weight_map.pop(f"{name}.{ending}")
            (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        save_file(tensors, shard)

    return damage


def say(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        stored = json.loads((folder / "config.json").read_text())["quantization_config"]
        edit_config(folder, quantization_config={**stored, **changes})

    return damage


def beyond(groups: Tensor) -> Tensor:
    groups[7] = 99
    return groups


def below(groups: Tensor) -> Tensor:
    groups[7] = -1
    return groups


def lose(_part: Tensor) -> None:
    return None


def forget_quantization(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    del content["quantization_config"]
    (folder / "config.json").write_text(json.dumps(content))


def state_of(**changes: Any) -> Callable[[Tensor], Tensor]:
    def change(state: Tensor) -> Tensor:
        content = {**json.loads(bytes(state.tolist())), **changes}
        return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)

    return change


NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    "name, damage, sentence",
    [
        ("gptq", change_part("scales", lose), "has no scales"),
        ("gptq", change_part("scales", lambda part: part[:-1]),
         "has parts of the shapes [8, 96], [2, 12] and [1, 96], which fit none of the bits and groups that "
         "config.json names"),
        ("gptq", change_part("qweight", lambda part: part[:-1]),
         "has g_idx of the shape [64], which does not fit its other parts"),
        ("gptq-symmetric", change_part("qweight", lambda part: part[:4]),
         "has parts of the shapes [4, 96], [2, 12] and [2, 96], which fit none of the bits and groups that "
         "config.json names"),
        ("gptq", change_part("qweight", lambda part: part.float()), "has qweight of the type F32"),
        ("gptq-act-order", change_part("g_idx", beyond), "has a g_idx beyond its 2 groups"),
        ("gptq-act-order", change_part("g_idx", below), "has a g_idx beyond its 2 groups"),
        ("gptq-act-order", change_part("g_idx", lambda part: part[1:]),
         "has g_idx of the shape [63], which does not fit its other parts"),
        ("gptq", say(bits=8),
         "The weight layers.0.self_attn.q_proj.weight has parts of the shapes [8, 64], [2, 8] and [2, 64], which fit "
         "none of the bits and groups that config.json names; give another revision, or the original checkpoint."),
        ("gptq", say(group_size=24),
         "The weight layers.0.self_attn.q_proj.weight has parts of the shapes [8, 64], [2, 8] and [2, 64], which fit "
         "none of the bits and groups that config.json names; give another revision, or the original checkpoint."),
        ("gptq", say(dynamic=[1]),
         "config.json has a dynamic that makes no sense; correct it, or give the original checkpoint."),
        ("gptq", say(bits=5),
         "GPTQ weights of 5 bits are not served; give the original checkpoint, or one in another format of "
         "docs/models.md."),
        ("gptq", say(checkpoint_format="marlin"),
         "GPTQ weights in the layout 'marlin' are not served; give the original checkpoint, or one in another format "
         "of docs/models.md."),
        ("gptq", say(is_marlin_format=True),
         "GPTQ weights in the layout 'marlin' are not served; give the original checkpoint, or one in another format "
         "of docs/models.md."),
        ("awq", change_part("qzeros", lose), "has no qzeros"),
        ("awq", change_part("qweight", lambda part: part[:-1]), "has 63 inputs, which groups of 32 do not divide"),
        ("awq", say(group_size=48),
         "The weight layers.0.self_attn.q_proj.weight has 64 inputs, which groups of 48 do not divide; give another "
         "revision, or the original checkpoint."),
        ("awq", say(version="gemv"),
         "AWQ weights in the layout 'gemv' are not served; give the original checkpoint, or one in another format of "
         "docs/models.md."),
        ("awq", say(bits=1 << 60),
         "config.json has a bits that makes no sense; correct it, or give the original checkpoint."),
        ("fp8-blocks", change_part("weight_scale_inv", lose), "is stored as F8_E4M3 without its scales"),
        ("fp8-blocks", change_part("weight_scale_inv", lambda part: part[:, :-1]),
         "has scale_inv of the shape [3, 1], which does not fit its other parts"),
        ("fp8-blocks", say(weight_block_size=[0, 32]),
         "config.json has a weight_block_size that makes no sense; correct it, or give the original checkpoint."),
        ("fp8-blocks", say(weight_block_size=[16, 16]),
         "The weight layers.0.self_attn.q_proj.weight has scale_inv of the shape [2, 2], which does not fit its "
         "other parts; give another revision, or the original checkpoint."),
        ("w4a16", change_part("weight_shape", lambda part: part * 1000),
         "has a weight_shape of [96000, 64000], which does not fit its packed numbers"),
        ("w4a16", change_part("weight_shape", lambda part: part.new_tensor([96, 1 << 60])),
         "has a weight_shape of [96, 1152921504606846976], which does not fit its packed numbers"),
        ("w4a16", change_part("weight_scale", lose), "has no weight_scale"),
        ("w4a16", say(sparsity_config={"format": "sparse-24-bitmask"}),
         "Sparse weights of compressed-tensors are not served; give the original checkpoint, or one in another "
         "format of docs/models.md."),
        ("w4a16", say(transform_config={"config_groups": {"u": {}}}),
         "Weights of compressed-tensors that were rotated (transform_config) are not served; give the original "
         "checkpoint, or one in another format of docs/models.md."),
        ("w4a16", say(format="marlin-24"),
         "compressed-tensors' weights in the format 'marlin-24' are not served; give the original checkpoint, or one "
         "in another format of docs/models.md."),
        ("w4a16", say(config_groups={}),
         "The weight layers.0.self_attn.q_proj.weight has the shape [64, 64] and scales of the shape [64, 2], which "
         "fit none of the schemes that config.json names; give another revision, or the original checkpoint."),
        ("w8a8", change_part("weight_scale", lose), "is stored as I8 without its scales"),
        ("nvfp4", change_part("weight_scale", lose), "has no weight_scale"),
        ("nvfp4", change_part("weight_scale_2", lose), "has weight of the type U8"),
        ("nvfp4", change_part("weight_scale_2", lambda part: part.expand(3)),
         "has weight_scale_2 of the shape [3], which does not fit its other parts"),
        ("nvfp4", change_part("weight_scale", lambda part: part[:, :-1]),
         "has weight_scale of the shape [96, 3], which does not fit its other parts"),
        ("nvfp4", change_part("weight", lambda part: part[:, :-1]), "has 62 inputs, which groups of 16 do not divide"),
        ("nvfp4", say(quant_algo="NVFP4_AWQ"),
         "ModelOpt's weights of the type 'NVFP4_AWQ' are not served; give the original checkpoint, or one in another "
         "format of docs/models.md."),
        ("bnb-nf4", change_part(NF4_STATE, lose), "has no quant_state, or several"),
        ("bnb-nf4", change_part(NF4_STATE, state_of(shape=[1 << 30, 1 << 30])),
         "is [1073741824, 1073741824] by its quant_state, and has as many bytes as another shape"),
        ("bnb-nf4", change_part(NF4_STATE, state_of(blocksize=0)), "has a quant_state that makes no sense"),
        ("bnb-nf4", change_part(NF4_STATE, lambda part: part[:-9]), "has a quant_state that makes no sense"),
        ("bnb-nf4", change_part(NF4_STATE, lambda part: part.repeat(100)), "has a quant_state of 7700 bytes"),
        ("bnb-nf4", change_part("weight.quant_map", lambda part: part[:9]),
         "has quant_map of the shape [9], which does not fit its other parts"),
        ("bnb-int8", change_part("weight_format", lambda part: part + 1), "has numbers in the order of a kernel"),
        ("auto-round-gptq", say(packing_format="auto_round:fp8_static"),
         "AutoRound's weights in the layout 'auto_round:fp8_static' are not served; give the original checkpoint, or "
         "one in another format of docs/models.md."),
        ("auto-round-gptq", say(data_type="mx_fp"),
         "AutoRound's weights of the type 'mx_fp' are not served; give the original checkpoint, or one in another "
         "format of docs/models.md."),
        ("auto-round-gptq", say(extra_config=[1]),
         "config.json has a extra_config that makes no sense; correct it, or give the original checkpoint."),
        ("auto-round-awq", say(extra_config={"x": {"group_size": 64}}),
         "AutoRound's AWQ weights of several bits or group sizes are not served; give the original checkpoint, or "
         "one in another format of docs/models.md."),
        ("awq", say(quant_method="aqlm"),
         "Weights quantised by 'aqlm' are not served; give the original checkpoint, or one in another format of "
         "docs/models.md: auto-round, awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, "
         "modelopt_fp4, mxfp4."),
        ("awq", forget_quantization,
         "The weight layers.0.self_attn.q_proj.qweight is stored as I32, and neither config.json nor "
         "hf_quant_config.json, quantize_config.json, quant_config.json says how to read it; give the original "
         "checkpoint, or one that describes its quantisation."),
        ("fp8-blocks", forget_quantization,
         "The weight layers.0.self_attn.q_proj.weight is stored as F8_E4M3, and neither config.json nor "
         "hf_quant_config.json, quantize_config.json, quant_config.json says how to read it; give the original "
         "checkpoint, or one that describes its quantisation."),
    ],
)  # fmt: skip
def test_a_bad_packed_checkpoint_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None], sentence: str
) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS[name](), num_blocks=1)
    damage(folder)
    with pytest.raises(CheckpointError) as refused:
        load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 1), dtype=torch.float32)
    of_weight = f"The weight layers.0.mlp.up_proj.weight {sentence}; give another revision, or the original checkpoint."
    assert refused.value.message == (sentence if sentence.endswith(".") else of_weight)


def test_weights_of_another_shape_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS["awq"](), num_blocks=1)
    edit_config(folder, intermediate_size=128)
    with pytest.raises(
        CheckpointError, match=r"_proj\.weight in the shape .* where the model in its config\.json has .*; correct"
    ):
        load_span(Checkpoint.from_pretrained(str(folder)), Span(0, 1), dtype=torch.float32)


def test_a_quantised_head_that_is_tied_is_refused(tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("llama", tmp_path, FORMATS["awq"](), num_blocks=1, with_head=True)
    load_edges(Checkpoint.from_pretrained(str(folder)), dtype=torch.float32)
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        Checkpoint.from_pretrained(str(folder))


def test_a_family_that_keeps_its_weights_transposed_is_refused(tmp_path: Path) -> None:
    folder, _ = make_packed_checkpoint("gpt2", tmp_path, FORMATS["bnb-int8"](), num_blocks=1)
    with pytest.raises(CheckpointError, match="gpt2 keep their weights transposed"):
        Checkpoint.from_pretrained(str(folder))
