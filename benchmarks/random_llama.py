"""Checkpoints with the shapes of Llama and random weights, drawn on a device: plain, or in four bits."""

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.checkpoints import make_tokenizer

SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 8192,
             "tie_word_embeddings": True},
    "wide": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 32,
             "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 1024, "max_position_embeddings": 8192,
             "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
           "tie_word_embeddings": True},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
           "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
           "tie_word_embeddings": False},
}  # fmt: skip
"""Llama 3.2 1B and 3B, and Llama 3.1 8B; `tiny` is for smoke tests.

A token of `wide` has as many keys and values in float32 as one of `8b` in bfloat16, and hardly any weights, so that a
handover of gigabytes can be rehearsed without a GPU.
"""

_INDEX: Final = "model.safetensors.index.json"
_EMBEDDING: Final = "embedding.safetensors"
_SPREAD: Final = 0.02
_BITS: Final = 4
_GROUP_SIZE: Final = 128
# The standard deviation of evenly drawn integers of four bits.
_SPREAD_OF_INTEGERS: Final = 4.6
_NUM_WRITERS: Final = 4


def write_checkpoint(folder: Path, size: str, dtype: torch.dtype, device: str, *, in_four_bits: bool = False) -> None:
    """Writes a complete checkpoint. All blocks have the same numbers.

    Args:
        folder: is made.
        size: one of `SHAPES`.
        dtype: the dtype of the weights, and of the scales of packed ones.
        device: where the numbers are drawn.
        in_four_bits: whether the linear layers of the blocks are packed as compressed-tensors does: symmetric integers
            of four bits, with a scale for each group of 128 inputs.
    """
    folder.mkdir()
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **SHAPES[size], rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    library: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = library.from_config(config)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if in_four_bits:
        path = folder / "config.json"
        facts = {**json.loads(path.read_text(encoding="utf-8")), "quantization_config": _QUANTIZATION}
        path.write_text(json.dumps(facts), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    shapes = {name: parameter.shape for name, parameter in empty.named_parameters()}
    first = "model.layers.0."
    block: dict[str, Tensor] = {}
    edges: dict[str, dict[str, Tensor]] = {}
    for name, shape in shapes.items():
        if name.startswith(first):
            block.update(_drawn(name.removeprefix(first), shape, dtype, generator, in_four_bits=in_four_bits))
        elif ".layers." not in name:
            shard = _EMBEDDING if "embed_tokens" in name else "head.safetensors"
            edges.setdefault(shard, {}).update(_drawn(name, shape, dtype, generator, in_four_bits=False))
    weight_map = {name: shard for shard, tensors in edges.items() for name in tensors}

    def write_block(number: int) -> None:
        named = {f"model.layers.{number}.{name}": tensor for name, tensor in block.items()}
        shard = f"block-{number}.safetensors"
        save_file(named, folder / shard)
        weight_map.update(dict.fromkeys(named, shard))

    for shard, tensors in edges.items():
        save_file(tensors, folder / shard)
    with ThreadPoolExecutor(_NUM_WRITERS) as writers:
        list(writers.map(write_block, range(config.num_hidden_layers)))
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def read_bytes(folder: Path) -> int:
    """The bytes of the weights that a token reads: all but the embedding, of which it reads one row.

    A tied embedding is read once, as the head.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shards = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return sum(
        (folder / shard).stat().st_size for shard in shards if config["tie_word_embeddings"] or shard != _EMBEDDING
    )


def stored_bytes(folder: Path) -> int:
    """The bytes of all weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


_QUANTIZATION: Final[Mapping[str, Any]] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None,
            "weights": {"num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group",
                        "group_size": _GROUP_SIZE},
        }
    },
}  # fmt: skip


def _drawn(
    name: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator, *, in_four_bits: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors on the CPU that stand for a weight of a checkpoint, by name."""
    device = generator.device
    if len(shape) == 1:
        yield name, torch.ones(shape, dtype=dtype)
    elif not in_four_bits:
        drawn = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
        yield name, drawn.cpu()
    else:
        num_outputs, num_inputs = shape
        words = (num_outputs, num_inputs * _BITS // 32)
        # Any word stands for eight integers.
        packed = torch.randint(-(2**31), 2**31, words, dtype=torch.int64, device=device, generator=generator)
        scales = torch.empty(num_outputs, num_inputs // _GROUP_SIZE, device=device)
        scales.uniform_(0.5, 1.5, generator=generator).mul_(_SPREAD / _SPREAD_OF_INTEGERS)
        yield f"{name}_packed", packed.int().cpu()
        yield f"{name}_scale", scales.to(dtype).cpu()
        yield f"{name}_shape", torch.tensor(shape)
