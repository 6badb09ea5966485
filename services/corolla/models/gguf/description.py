"""Converts a GGUF file's metadata to a configuration of transformers. Pure.

transformers has a table of the metadata's keys. This module adds settings that the table lacks, or refuses the file,
since a model with a wrong rotary embedding would run and give wrong answers.
"""

from collections.abc import Mapping
from typing import Any, Final

from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.header import GgufHeader

# Maps llama.cpp's name of an architecture to transformers' model type and the key in transformers' table.
_ARCHITECTURES: Final = {
    "llama": ("llama", "llama"),
    "qwen2": ("qwen2", "qwen2"),
    "qwen3": ("qwen3", "qwen3"),
    "qwen3moe": ("qwen3_moe", "qwen3_moe"),
    "gemma2": ("gemma2", "gemma2"),
    "gemma3": ("gemma3_text", "gemma3"),
}
# Keys that transformers' table lacks.
_MORE_KEYS: Final = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SIZES: Final = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_WHOLE_HEADS_OF_27B: Final = {"gemma2": 46, "gemma3_text": 62}
_SCALINGS: Final = frozenset({"linear", "yarn"})
_FREQUENCY_FACTORS: Final = "rope_freqs.weight"
# The texts of tokens that end a turn or a document; llama.cpp stops at each of them, too.
_END_TEXTS: Final = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<|eom_id|>", "<EOT>"}
)
_CONTROL_TOKEN: Final = 3


def configuration(header: GgufHeader) -> dict[str, Any]:
    """The content of a `config.json` for the file.

    Raises:
        CheckpointError: this architecture or its rotary embedding is not served, or the file does not say how large the
            model is.
    """
    architecture = header.architecture
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"GGUF files of the architecture {architecture!r} are not served; give the model as safetensors, or one of "
            f"these: {', '.join(_ARCHITECTURES)}."
        )
    model_type, row = _ARCHITECTURES[architecture]
    found: dict[str, Any] = {
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(row, {}),
        "model_type": model_type,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ())),
    }
    rows: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    for key, name in rows[row].items():
        value = header.metadata.get(f"{architecture}.{key}")
        if name is not None and value is not None:
            found[name] = value
    for key, name in rows["tokenizer"].items():
        if (value := header.metadata.get(f"tokenizer.{key}")) is not None:
            found[name] = value
    for key, name in _MORE_KEYS.items():
        if (value := header.metadata.get(f"{architecture}.{key}")) is not None:
            found[name] = value
    if model_type == "llama" and "sliding_window" in found:
        found["model_type"] = "mistral"  # GGUF files of Mistral models have the architecture llama
    _check_sizes(found)
    _add_score_scale(found)
    _add_rotary_scaling(found, header, architecture)
    return found


def _check_sizes(found: Mapping[str, Any]) -> None:
    absent = [name for name in _SIZES if not isinstance(found.get(name), int) or found[name] < 1]
    if absent:
        raise CheckpointError(f"The file does not say the model's {absent[0]}; fetch it again.")


def _add_score_scale(found: dict[str, Any]) -> None:
    if found["model_type"] in _WHOLE_HEADS_OF_27B:
        # The file lacks the divisor of attention scores; llama.cpp derives it from the number of blocks.
        is_27b = found["num_hidden_layers"] == _WHOLE_HEADS_OF_27B[found["model_type"]]
        per_head = found["hidden_size"] // found["num_attention_heads"]
        found["query_pre_attn_scalar"] = per_head if is_27b else found.get("head_dim", per_head)


def _add_rotary_scaling(found: dict[str, Any], header: GgufHeader, architecture: str) -> None:
    if _FREQUENCY_FACTORS in header.tensors or any(".rope_factors_" in name for name in header.tensors):
        raise CheckpointError(
            "The file keeps a rotary embedding's factors as a tensor, which is not served; give the model as "
            "safetensors."
        )
    prefix = f"{architecture}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    kind = scaling.get("type", "none")
    if kind == "none":
        return
    if kind not in _SCALINGS or "factor" not in scaling:
        raise CheckpointError(
            f"The file has a rotary embedding of the type {kind!r}, which is not served; give the model as safetensors."
        )
    found["rope_scaling"] = {"rope_type": kind, "factor": scaling["factor"]}
    if "original_context_length" in scaling:
        found["rope_scaling"]["original_max_position_embeddings"] = scaling["original_context_length"]


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: first those that the file names, then control tokens with one of `_END_TEXTS`."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    known = [
        token_id
        for token_id, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL_TOKEN and text in _END_TEXTS
    ]
    return list(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))
