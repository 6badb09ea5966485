"""Loading packed safetensors checkpoints: the peak of memory while a span is loaded, what stays, and how long it takes.

    python -m benchmarks.expansion --hidden-size 2048 --blocks 8 --quantizations none packed

Each format is a checkpoint of random packed numbers, of which a process of its own reads all blocks, in bfloat16, and
expands them, or keeps them packed where there is a kernel.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.command import progress, run
from benchmarks.figures import Figure
from benchmarks.loading import loading
from corolla.chassis.weight_formats import PACKED

_GROUP: Final = 128
_BLOCK: Final = 128
_VOCABULARY: Final = 1000
_SCALE: Final = 1e-3
# Eight numbers of four bits that stand for zero.
_MIDDLE: Final = 0x77777777
# Formats that are multiplied as they are, on processors.
_KERNELS: Final = ("AWQ", "GPTQ", "GPTQ with activation order", "w4a16")
Pack = Callable[[int, int], dict[str, Tensor]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden-size", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--formats", default=",".join(_FORMATS), help="separated by commas")
    parser.add_argument("--quantizations", nargs="+", default=["none"], help="none, packed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=8, help="of the model, all of which are loaded")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    for name in options.formats.split(","):
        config, pack = _FORMATS[name]
        with tempfile.TemporaryDirectory() as scratch:
            _write(Path(scratch), options.hidden_size, options.blocks, config, pack)
            for quantization in options.quantizations:
                if quantization == PACKED and name not in _KERNELS:
                    continue
                what, part = f"{name}, {quantization}", f"blocks 0:{options.blocks}"
                yield from loading(what, scratch, part, "bfloat16", quantization=quantization, rounds=options.rounds)
    progress("")


def _write(folder: Path, hidden_size: int, num_blocks: int, config: Mapping[str, Any] | None, pack: Pack) -> None:
    intermediate = hidden_size * 11 // 4 // 256 * 256
    whole: Any = LlamaConfig
    described: LlamaConfig = whole(
        hidden_size=hidden_size, intermediate_size=intermediate, num_hidden_layers=num_blocks,
        num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 64, vocab_size=_VOCABULARY,
    )  # fmt: skip
    content = {**described.to_dict(), **({"quantization_config": config} if config else {})}
    (folder / "config.json").write_text(json.dumps(content))
    weight_map: dict[str, str] = {}
    for block in range(num_blocks):
        tensors: dict[str, Tensor] = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            tensors.update({f"{name}.{ending}": part for ending, part in pack(hidden_size, hidden_size).items()})
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            tensors.update({f"{name}.{ending}": part for ending, part in pack(intermediate, hidden_size).items()})
        parts = pack(hidden_size, intermediate)
        tensors.update({f"mlp.down_proj.{ending}": part for ending, part in parts.items()})
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.weight"] = torch.ones(hidden_size)
        stored = {f"model.layers.{block}.{name}": tensor for name, tensor in tensors.items()}
        save_file(stored, folder / f"block-{block}.safetensors")
        weight_map.update(dict.fromkeys(stored, f"block-{block}.safetensors"))
    ends = {name: torch.zeros(_VOCABULARY, hidden_size) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file({**ends, "model.norm.weight": torch.ones(hidden_size)}, folder / "ends.safetensors")
    weight_map.update(dict.fromkeys([*ends, "model.norm.weight"], "ends.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _octets(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _words(*shape: int) -> Tensor:
    return _octets(*shape[:-1], 4 * shape[-1]).view(torch.int32)


def _plain(num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
    return {"weight": torch.zeros(num_outputs, num_inputs, dtype=torch.bfloat16)}


def _awq(num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
    groups = num_inputs // _GROUP
    return {
        "qweight": _words(num_inputs, num_outputs // 8),
        "qzeros": _words(groups, num_outputs // 8),
        "scales": torch.full((groups, num_outputs), _SCALE, dtype=torch.float16),
    }


def _gptq(num_outputs: int, num_inputs: int, *, is_ordered: bool) -> dict[str, Tensor]:
    groups = num_inputs // _GROUP
    group_of = torch.arange(num_inputs) // _GROUP
    if not is_ordered:
        # Inputs of one layer have one order.
        group_of = group_of[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))]
    return {
        "qweight": _words(num_inputs // 8, num_outputs),
        "qzeros": torch.full((groups, num_outputs // 8), _MIDDLE, dtype=torch.int32),
        "scales": torch.full((groups, num_outputs), _SCALE, dtype=torch.float16),
        "g_idx": group_of.to(torch.int32),
    }


def _fp8(num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
    return {
        "weight": torch.zeros(num_outputs, num_inputs, dtype=torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(num_outputs // _BLOCK, num_inputs // _BLOCK),
    }


def _w4a16(num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
    return {
        "weight_packed": _words(num_outputs, num_inputs // 8),
        "weight_scale": torch.full((num_outputs, num_inputs // _GROUP), _SCALE, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }


def _nf4(num_outputs: int, num_inputs: int) -> dict[str, Tensor]:
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [num_outputs, num_inputs]})
    return {
        "weight": _octets(num_outputs * num_inputs // 2, 1),
        "weight.absmax": torch.ones(num_outputs * num_inputs // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }


_FORMATS: Final[Mapping[str, tuple[Mapping[str, Any] | None, Pack]]] = {
    "bfloat16": (None, _plain),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False},
        partial(_gptq, is_ordered=True),
    ),
    "GPTQ with activation order": (
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": True},
        partial(_gptq, is_ordered=False),
    ),
    "FP8 in blocks": ({"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}, _fp8),
    "w4a16": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": _GROUP,
                    },
                }
            },
        },
        _w4a16,
    ),
    "NF4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
}


if __name__ == "__main__":
    run(__doc__, add_options, measure)
