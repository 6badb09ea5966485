"""Writes tiny GGUF files, which llama.cpp's converter makes of tiny checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_long_rope_checkpoint, make_tiny_checkpoint
from tests.llama_cpp.converter import convert

LLAMA3: Final = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_NO_WINDOWS: Final = {"sliding_window": None, "layer_types": None}
_ALL_EXPERTS: Final[Mapping[str, Any]] = {"mlp_only_layers": []}
_DEFAULT_ROPE: Final = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_SIGMOID: Final = {"scoring_func": "sigmoid"}
# These are changes of a family's tiny configuration to one that files can describe, and fields that published
# checkpoints have in config.json and that transformers does not keep.
_FACTS: Final[Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "cohere": ({"tie_word_embeddings": True}, {}),
    "cohere2": ({"tie_word_embeddings": True, "layer_types": None}, {"rotary_pct": 1.0}),
    "deepseek_v3": ({}, _SIGMOID),
    "dots1": (_NO_WINDOWS, _SIGMOID),
    "ernie4_5_moe": ({"moe_layer_end_index": -1}, {"moe_layer_interval": 1}),
    "exaone_moe": ({}, _SIGMOID),
    "gemma": ({"tie_word_embeddings": True}, {}),
    "gemma2": ({"tie_word_embeddings": True, "layer_types": None}, {}),
    # The converter keeps only rows that tokens have.
    "gemma3_text": ({"tie_word_embeddings": True, "layer_types": None, "vocab_size": 272}, {}),
    "glm4_moe_lite": ({"first_k_dense_replace": 1}, _SIGMOID),
    "gpt_oss": ({"layer_types": None}, {}),
    # transformers has other names for these kinds of blocks.
    "granitemoehybrid": ({"mamba_chunk_size": 256}, {"layer_types": ["mamba", "attention", "mamba", "mamba"]}),
    "hunyuan_v1_dense": (_DEFAULT_ROPE, {}),
    "hunyuan_v1_moe": (
        _DEFAULT_ROPE, {"moe_intermediate_size": [96] * 4, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4}
    ),
    "kimi_linear": (
        {},
        {
            "linear_attn_config": {"full_attn_layers": [2], "head_dim": 16, "short_conv_kernel_size": 4},
            "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid",
        },
    ),
    "lfm2_moe": ({"tie_word_embeddings": True}, {}),
    "minimax_m2": ({}, {"rotary_dim": 16, **_SIGMOID}),
    "olmoe": ({"clip_qkv": None}, {}),
    "qwen2": ({"use_sliding_window": False, **_NO_WINDOWS}, {}),
    "qwen2_moe": (_ALL_EXPERTS, {}),
    "qwen3_moe": ({**_ALL_EXPERTS, "norm_topk_prob": True}, {}),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ({}, {"mtp_num_hidden_layers": 1})),
    "smollm3": ({"no_rope_layer_interval": 4}, {}),
    "starcoder2": ({"sliding_window": None}, {}),
}  # fmt: skip
# Settings that converters have not written, or do not write any more.
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {"mistral": {"llama.attention.sliding_window": 12}}
FAMILIES_OF_FILES: Final = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4", "glm4_moe", "phi3", "cohere", "cohere2",
    "granite", "granitemoe", "granitemoeshared", "olmo", "olmo2", "olmo3", "olmoe", "smollm3", "seed_oss", "exaone4",
    "exaone_moe", "ministral3", "minimax_m2", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2",
    "lfm2_moe", "arcee", "starcoder2", "dots1", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "kimi_linear", "granitemoehybrid",
)  # fmt: skip
"""The families of transformers of which files are made."""
PACKED_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "qwen3_moe")
"""Those of them that other tests than those of the format need."""


def make_tiny_gguf(
    family: str, folder: Path, *, kind: str = "F32", num_blocks: int = 4, changes: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """A tiny checkpoint of a family, and the GGUF file that is made of it.

    Args:
        kind: the type of the matrices, a name of `gguf.GGMLQuantizationType` that the package can write.
        changes: further fields of the configuration.

    Returns:
        The checkpoint's folder and the file.
    """
    own, published = _FACTS.get(family, ({}, {}))
    changes = {**own, **(changes or {})}
    source = make_tiny_checkpoint(family, folder / "source", num_blocks=num_blocks, config_changes=changes)
    if family == "kimi_linear":
        _rename_dense_block(source)
    return source, convert_tiny(source, folder / f"tiny-{family}.{kind}.gguf", kind, published, _SETTINGS.get(family))


def _rename_dense_block(source: Path) -> None:
    """Gives the dense block of a Kimi Linear the names of published checkpoints: transformers saves it by others."""
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        save_file(
            {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.0.block_sparse_moe.", "layers.0.mlp."))


def make_long_rope_gguf(folder: Path) -> tuple[Path, Path]:
    """A tiny checkpoint of `phi3` with other factors for long texts, and the GGUF file that is made of it."""
    source = make_long_rope_checkpoint("phi3", folder / "source")
    return source, convert_tiny(source, folder / "tiny.gguf")


def convert_tiny(
    source: Path,
    path: Path,
    kind: str = "F32",
    published: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the GGUF file of a tiny checkpoint; see `make_tiny_gguf`. Returns `path`."""
    plain = path if kind == "F32" and not settings else path.with_name("plain.gguf")
    convert(source, plain, "gpt-2", published or {})
    if plain != path:
        rewrite_gguf(plain, path, settings, kind=kind)
        plain.unlink()
    return path


def _is_matrix(tensor: gguf.ReaderTensor) -> bool:
    return len(tensor.shape) >= 2 and not any(part in tensor.name for part in ("_norm", "gate_inp", "conv", "ssm_"))


def add_setting(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a setting with the type that llama.cpp expects; its integers have no sign."""
    kinds = gguf.GGUFValueType
    writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))


def rewrite_gguf(
    path: Path,
    target: Path,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any] | None] | None = None,
    max_tensors: int = 0,
    kind: str = "F32",
) -> Path:
    """Writes a file once more with other settings and tensors of floats; None leaves one out. Returns `target`.

    With `max_tensors`, the file is split into parts of so many tensors, whose names follow from `target`. With `kind`,
    matrices of floats get this type, if their rows are whole blocks.
    """
    wanted = gguf.GGMLQuantizationType[kind]
    block_weights, _ = gguf.GGML_QUANT_SIZES[wanted]
    settings, tensors = settings or {}, tensors or {}
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=max_tensors)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in settings:
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for key, value in settings.items():
        if value is not None:
            add_setting(writer, key, value)
    for tensor in reader.tensors:
        if tensor.name in tensors:
            continue
        is_changed = kind != "F32" and _is_matrix(tensor) and tensor.shape[0] % block_weights == 0
        writer.add_tensor(
            tensor.name,
            gguf.quants.quantize(tensor.data, wanted) if is_changed else tensor.data,
            raw_dtype=wanted if is_changed else tensor.tensor_type,
        )
    for name, values in tensors.items():
        if values is not None:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
