"""Writes tiny checkpoints whose weights are packed, each next to one with the same weights expanded.

Where a format's own library runs on a CPU, it packs, and it or transformers expands. AutoAWQ and GPTQModel do not
install as wheels: their packing is written out here, number by number, and what it holds is known.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bitsandbytes import functional as bnb
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import make_tiny_checkpoint

INDEX = "model.safetensors.index.json"
# Mixtral's experts have these numbers.
_LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")

Packed = tuple[dict[str, Tensor], Tensor]
"""The parts, by what stands behind the module's name and a dot, and the weights that they stand for."""


@dataclass(frozen=True)
class Made:
    """One way to pack.

    Attributes:
        config: what `config.json` says.
        pack: of the weight of a linear layer.
        experts: of a family's experts that lie in one tensor, which only MXFP4 knows; by the tensor's name.
    """

    config: Mapping[str, Any]
    pack: Callable[[Tensor], Packed] | None = None
    experts: Callable[[Tensor], Packed] | None = field(default=None)


def make_packed_checkpoint(
    family: str,
    folder: Path,
    made: Made,
    *,
    num_blocks: int = 4,
    plain: tuple[str, ...] = (),
    with_head: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Writes a random checkpoint of a family, packed, and the same one expanded, in float32.

    Args:
        plain: parts of modules' names that are left as they are.
        with_head: whether the head is packed, too.
        changes: further fields of the configuration.

    Returns:
        The two folders.
    """
    source = make_tiny_checkpoint(family, folder / "source", num_blocks=num_blocks, config_changes=changes)
    folders = folder / f"{family}-packed", folder / f"{family}-expanded"
    pack_checkpoint(source, *folders, made, plain=plain, with_head=with_head)
    return folders


def pack_checkpoint(
    source: Path,
    packed_folder: Path,
    expanded_folder: Path,
    made: Made,
    *,
    plain: tuple[str, ...] = (),
    with_head: bool = False,
) -> None:
    """Writes a checkpoint packed, and the same one expanded, in float32; see `make_packed_checkpoint`."""
    for target in (packed_folder, expanded_folder):
        shutil.copytree(source, target)
    weight_map: dict[str, str] = {}
    for shard in sorted(source.glob("*.safetensors")):
        packed: dict[str, Tensor] = {}
        expanded: dict[str, Tensor] = {}
        for name, weight in load_file(shard).items():
            parts, whole = _parts_of(name, weight, made, plain, with_head)
            packed.update(parts)
            expanded[name] = whole.contiguous().clone()
        save_file({name: tensor.contiguous() for name, tensor in packed.items()}, packed_folder / shard.name)
        save_file(expanded, expanded_folder / shard.name)
        weight_map.update(dict.fromkeys(packed, shard.name))
    if (packed_folder / INDEX).exists():
        (packed_folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_config(packed_folder, quantization_config=dict(made.config))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _parts_of(name: str, weight: Tensor, made: Made, plain: tuple[str, ...], with_head: bool) -> Packed:
    if any(each in name for each in plain):
        return {name: weight}, weight
    if made.experts is not None and name.endswith((".gate_up_proj", ".down_proj")):
        parts, whole = made.experts(weight)
        return {f"{name}_{ending}": part for ending, part in parts.items()}, whole
    is_head = with_head and name == "lm_head.weight"
    if made.pack is not None and weight.dim() == 2 and (name.endswith(_LINEAR) or is_head):
        parts, whole = made.pack(weight)
        module = name.removesuffix(".weight")
        return {f"{module}.{ending}": part for ending, part in parts.items()}, whole.float()
    return {name: weight}, weight


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def compressed_tensors(layout: str, *, ignore: tuple[str, ...] = ("lm_head",), **arguments: Any) -> Made:
    """Quantises by the library: its observers' rule, its compressor, its decompressor."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def pack(weight: Tensor) -> Packed:
        state = {"weight": weight, **compressed_scales(weight, args)}
        parts = {name: part for name, part in compressor.compress(state, scheme).items() if part is not None}
        if layout == "nvfp4-pack-quantized":
            # What the compressor calls expands to bfloat16, which has not bits enough; it can do float32, too.
            numbers = unpack_fp4_from_uint8(parts["weight_packed"], *weight.shape, dtype=torch.float32)
            scales = parts["weight_scale"].float()
            return parts, dequantize(numbers, scales, args=args, global_scale=parts["weight_global_scale"])
        return parts, compressor.decompress(dict(parts), scheme)["weight"]

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "input_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": layout, "ignore": list(ignore),
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip
    return Made(config, pack)


def compressed_scales(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    """Scales and zero points by the least and the largest number of what shares them."""
    num_outputs, num_inputs = weight.shape
    strategy = str(args.strategy)
    if strategy == "tensor":
        least, most = weight.min().view(1), weight.max().view(1)
    elif strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    elif strategy == "block":
        high, wide = args.block_structure or (1, 1)
        rows, columns = math.ceil(num_outputs / high), math.ceil(num_inputs / wide)
        padded = torch.nn.functional.pad(weight, (0, columns * wide - num_inputs, 0, rows * high - num_outputs))
        blocks = padded.view(rows, high, columns, wide)
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        groups = weight.view(num_outputs, -1, args.group_size or num_inputs)
        least, most = groups.amin(2), groups.amax(2)
    found: dict[str, Tensor] = {}
    global_scale = None
    if strategy == "tensor_group":
        global_scale = (448.0 * 6.0 / weight.abs().max()).view(1)
        found["weight_global_scale"] = global_scale
    scale, zero_point = calculate_qparams(least, most, args, global_scale=global_scale)
    found["weight_scale"] = scale
    if not args.symmetric:
        found["weight_zero_point"] = zero_point
    return found


# --- AWQ --------------------------------------------------------------------------------------------------------------

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(group_size: int = 32) -> Made:
    """Packs as AutoAWQ's `WQLinear_GEMM.from_linear` does; compressed-tensors' converter expands."""
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    library = AutoAWQConverter.from_autoawq_config(config)
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=group_size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")

    def pack(weight: Tensor) -> Packed:
        numbers, zeros, scales = _integers(weight, 4, group_size)
        parts = {
            "qweight": _awq_words(numbers.T), "qzeros": _awq_words(zeros.T), "scales": scales.T.contiguous(),
        }  # fmt: skip
        converted = library.process({f"m.{name}": part.clone() for name, part in parts.items()})
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        state = {name.removeprefix("m."): part for name, part in converted.items()}
        return parts, compressor.decompress({**state, "weight_scale": state["weight_scale"].float()}, scheme)["weight"]

    return Made(config, pack)


def _awq_words(numbers: Tensor) -> Tensor:
    """int `[rows, columns]` to int32 `[rows, columns / 8]`."""
    words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, which in enumerate(_AWQ_ORDER):
            words[:, column] |= numbers[:, column * 8 + which].long() << (4 * place)
    return _signed(words)


# --- GPTQ -------------------------------------------------------------------------------------------------------------


def gptq(
    bits: int = 4, group_size: int = 32, *, layout: str = "gptq", is_ordered: bool = False, has_g_idx: bool = True,
    is_symmetric: bool = False, seed: int = 0,
) -> Made:  # fmt: skip
    """Packs as AutoGPTQ's and GPTQModel's `pack` does; what is expanded is known."""
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": is_ordered, "sym": is_symmetric,
        "checkpoint_format": layout,
    }  # fmt: skip

    def pack(weight: Tensor) -> Packed:
        num_inputs = weight.shape[1]
        # Layers of the same inputs have the same order.
        generator = torch.Generator().manual_seed(seed + num_inputs)
        size = num_inputs if group_size == -1 else group_size
        groups = torch.arange(num_inputs) // size
        if is_ordered:
            groups = groups[torch.randperm(num_inputs, generator=generator)]
        # The inputs of a group next to each other, and back.
        order = groups.argsort(stable=True)
        numbers, zeros, scales = _integers(weight[:, order], bits, size, is_symmetric=is_symmetric)
        numbers = numbers[:, order.argsort()]
        scales_of_inputs, zeros_of_inputs = scales.float()[:, groups], zeros[:, groups]
        stored_zeros = (zeros - (1 if layout == "gptq" else 0)) % 2**bits
        parts = {
            "qweight": _words_of_bits(numbers, bits).T.contiguous(),
            "qzeros": _words_of_bits(stored_zeros.T, bits),
            "scales": scales.T.contiguous(),
        }
        if has_g_idx:
            parts["g_idx"] = groups.int()
        return parts, (numbers - zeros_of_inputs).float() * scales_of_inputs

    return Made(config, pack)


def auto_round(layout: str, others: Mapping[str, Any] | None = None) -> Made:
    """Packs as AutoRound's `save_quantized_as_autoround` does, in the layout of another library.

    Its `dynamic_import_quant_linear_for_packing` chooses that library: AutoGPTQ's zero points are stored less one.

    Args:
        layout: what follows `auto_round:` in `packing_format`.
        others: `extra_config`, with the settings of some modules.
    """
    made = awq() if "awq" in layout else gptq(layout="gptq" if layout == "auto_gptq" else "gptq_v2", has_g_idx=False)
    config = {
        "quant_method": "auto-round", "packing_format": f"auto_round:{layout}", "bits": 4, "group_size": 32,
        "sym": False, "data_type": "int", "iters": 200, "autoround_version": "0.16.1",
        "block_name_to_quantize": "model.layers", **({"extra_config": others} if others else {}),
    }  # fmt: skip
    return Made(config, made.pack)


def _words_of_bits(numbers: Tensor, bits: int) -> Tensor:
    """int `[rows, columns]` to int32 `[rows, words]`: one long number for each row, cut into words."""
    num_words = math.ceil(numbers.shape[1] * bits / 32)
    rows = []
    for row in numbers.tolist():
        whole = sum(number << (place * bits) for place, number in enumerate(row))
        rows.append([(whole >> (32 * word)) & 0xFFFFFFFF for word in range(num_words)])
    return _signed(torch.tensor(rows, dtype=torch.int64))


def _signed(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _integers(
    weight: Tensor, bits: int, group_size: int, *, is_symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds to nearest: numbers `[out, in]`, zero points and float16 scales `[out, groups]`."""
    groups = weight.view(len(weight), -1, group_size)
    most = 2**bits - 1
    if is_symmetric:
        scales = (2 * groups.abs().amax(2) / most).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)) / most).half()
        zeros = (-groups.amin(2).clamp(max=0) / scales.float()).round().clamp(0, most)
    numbers = (groups / scales.float().unsqueeze(2)).round() + zeros.unsqueeze(2)
    return numbers.clamp(0, most).view_as(weight).long(), zeros.long(), scales


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8(block: tuple[int, int] | None = (32, 32), *, scale_type: torch.dtype = torch.float32) -> Made:
    """Quantises by transformers' own quantiser and its inverse; None: one scale for a weight."""
    library: Any = FineGrainedFP8Config
    settings = library(weight_block_size=block)
    holder = SimpleNamespace(quantization_config=settings)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}

    def pack(weight: Tensor) -> Packed:
        quantiser: Any = Fp8Quantize(holder)
        parts = {name.removeprefix("m."): part for name, part in quantiser.convert({"m.weight": weight}).items()}
        parts["weight_scale_inv"] = parts["weight_scale_inv"].to(scale_type)
        expand: Any = Fp8Dequantize(holder)
        # It expands to the type of the scales.
        whole = expand.convert({**parts, "weight_scale_inv": parts["weight_scale_inv"].float()})["weight"]
        return parts, whole

    return Made(config, pack)


def fp8_of_outputs(method: str = "fbgemm_fp8", kind: torch.dtype = torch.float8_e4m3fn) -> Made:
    """A scale for each output, as FBGEMM's."""

    def pack(weight: Tensor) -> Packed:
        scales = weight.abs().amax(1, keepdim=True) / torch.finfo(kind).max
        numbers = (weight / scales).to(kind)
        return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales

    return Made({"quant_method": method, "activation_scale_ub": 1200.0}, pack)


# --- floats of four bits ----------------------------------------------------------------------------------------------

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """The codes of the nearest numbers."""
    return (scaled.abs().unsqueeze(-1) - _E2M1).abs().argmin(-1) | ((scaled < 0).long() << 3)


def _octets_of_codes(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def nvfp4(*, fp8: tuple[int, ...] = ()) -> Made:
    """Packs and expands as `NVFP4QTensor` of NVIDIA's TensorRT-Model-Optimizer does.

    The names, shapes and types of tensors are those of nvidia's checkpoints, as vLLM's `modelopt.py` reads them.

    Args:
        fp8: weights with so many outputs are of FP8, as in models of mixed precision.
    """

    def pack(weight: Tensor) -> Packed:
        if len(weight) in fp8:
            own = weight.abs().max() / 448.0
            numbers = (weight / own).to(torch.float8_e4m3fn)
            return {"weight": numbers, "weight_scale": own, "input_scale": own.clone()}, numbers.float() * own
        groups = weight.view(len(weight), -1, 16)
        own = weight.abs().max() / (6.0 * 448.0)
        scales = (groups.abs().amax(2) / (6.0 * own)).clamp(max=448.0).to(torch.float8_e4m3fn)
        of_numbers = (scales.float() * own).unsqueeze(2)
        codes = _e2m1_codes(torch.where(of_numbers == 0, 0, groups / of_numbers))
        whole = torch.cat([_E2M1, -_E2M1])[codes] * of_numbers
        parts = {"weight": _octets_of_codes(codes.view_as(weight)), "weight_scale": scales, "weight_scale_2": own}
        return {**parts, "input_scale": own.clone()}, whole.view_as(weight)

    config = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" if fp8 else "NVFP4", "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.29.0"}, "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }  # fmt: skip
    return Made(config, pack)


def mxfp4() -> Made:
    """gpt-oss' experts; transformers' own function expands them."""

    def experts(weight: Tensor) -> Packed:
        groups = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
        exponents = torch.floor(torch.log2(groups.abs().amax(3).clamp(min=1e-20))) - 2
        codes = _e2m1_codes(groups / torch.exp2(exponents).unsqueeze(3))
        parts = {"blocks": _octets_of_codes(codes), "scales": (exponents + 127).to(torch.uint8)}
        expand: Any = convert_moe_packed_tensors
        return parts, expand(parts["blocks"], parts["scales"], dtype=torch.float32)

    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return Made(config, experts=experts)


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


def bitsandbytes_4bit(kind: str = "nf4", *, is_nested: bool = False, storage: torch.dtype = torch.uint8) -> Made:
    """Quantises by the library. On CPUs it expands rows wrongly that fill no whole blocks, and so is given one row."""
    options: dict[str, Any] = {
        "blocksize": 64,
        "compress_statistics": is_nested,
        "quant_type": kind,
        "quant_storage": storage,
    }

    def pack(weight: Tensor) -> Packed:
        numbers, state = bnb.quantize_4bit(weight, **options)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        whole = bnb.dequantize_4bit(*bnb.quantize_4bit(weight.flatten(), **options)).view_as(weight)
        return {"weight": numbers, **parts}, whole

    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
    }  # fmt: skip
    return Made(config, pack)


def bitsandbytes_8bit() -> Made:
    """Quantises by the library."""

    def pack(weight: Tensor) -> Packed:
        numbers, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        parts = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, bnb.int8_vectorwise_dequant(numbers, scales)

    return Made({"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


_CT = compressed_tensors
FORMATS: Mapping[str, Callable[[], Made]] = {
    "awq": awq,
    "gptq": gptq,
    "gptq-act-order": lambda: gptq(is_ordered=True),
    "gptq-v2": lambda: gptq(layout="gptq_v2"),
    "gptq-symmetric": lambda: gptq(is_symmetric=True, has_g_idx=False),
    "gptq-2-bits": lambda: gptq(2, 16),
    "gptq-3-bits": lambda: gptq(3, is_ordered=True),
    "gptq-8-bits": lambda: gptq(8, -1),
    "auto-round-gptq": lambda: auto_round("auto_gptq", {"lm_head": {"bits": 16, "data_type": "float"}}),
    "auto-round-gptq-v2": lambda: auto_round("gptqmodel"),
    "auto-round-awq": lambda: auto_round("auto_awq"),
    "fp8-blocks": fp8,
    "fp8-blocks-bf16-scales": lambda: fp8(scale_type=torch.bfloat16),
    "fp8-one-scale": lambda: fp8(None),
    "fp8-outputs": fp8_of_outputs,
    "w4a16": lambda: _CT("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "w4a16-asymmetric": lambda: _CT("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "w4a16-outputs": lambda: _CT("pack-quantized", num_bits=4, strategy="channel"),
    "w8a16": lambda: _CT("pack-quantized", num_bits=8, strategy="channel"),
    "w3a16": lambda: _CT("pack-quantized", num_bits=3, strategy="group", group_size=32),
    "w8a8": lambda: _CT("int-quantized", num_bits=8, strategy="channel"),
    "w8a8-asymmetric": lambda: _CT("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct-fp8-outputs": lambda: _CT("float-quantized", num_bits=8, type="float", strategy="channel"),
    "ct-fp8-one-scale": lambda: _CT("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "ct-fp8-blocks": lambda: _CT(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 40]
    ),
    "ct-nvfp4": lambda: _CT("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "ct-mxfp4": lambda: _CT(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "ct-mxfp8": lambda: _CT(
        "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
    "nvfp4": nvfp4,
    "bnb-nf4": bitsandbytes_4bit,
    "bnb-nf4-nested": lambda: bitsandbytes_4bit(is_nested=True),
    "bnb-fp4": lambda: bitsandbytes_4bit("fp4", storage=torch.float32),
    "bnb-int8": bitsandbytes_8bit,
}
"""Those of linear layers, by the names that tests have for them."""
