"""Converts a GGUF file's metadata to a configuration of transformers. Pure.

transformers has a table of the metadata's keys. This module adds settings that the table lacks, with the defaults of
llama.cpp. It refuses a file with any other setting of its architecture, since a model that lacks one would run and give
wrong answers.
"""

import math
import re
from collections.abc import Iterable, Mapping
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
# Keys that transformers' table lacks, by model type; "" stands for all of them.
_MORE_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "": {"attention.key_length": "head_dim"},
    "llama": {"attention.sliding_window": "sliding_window"},
    "qwen3_moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": {
        "final_logit_softcapping": "final_logit_softcapping",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
}
# Keys that this module itself reads.
_OWN_KEYS: Final = frozenset({"rope.dimension_count", "attention.value_length", "attention.sliding_window_pattern"})
# Keys that llama.cpp does not read for these architectures, and that describe how a file came about.
_NOTES: Final = frozenset({"tensor_data_layout", "rope.scaling.finetuned", "attention.layer_norm_epsilon"})
# llama.cpp computes with these values of settings as if they were absent; 0 experts are an example.
_WITHOUT_EFFECT: Final[Mapping[str, tuple[float, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_BLOCK: Final = re.compile(r"blk\.(?P<block>\d{1,6})\.")
_SIZES: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "intermediate_size",
)  # fmt: skip
_WHOLE_HEADS_OF_27B: Final = {"gemma2": 46, "gemma3_text": 62}
# Every so many blocks, one block attends to all tokens, and the others have a window.
_WINDOW_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6}
_SCALINGS: Final = frozenset({"none", "linear", "yarn"})
_FREQUENCY_FACTORS: Final = "rope_freqs.weight"
# The settings of transformers that add biases: the model types that have the setting, and the names of the biases.
_BIASES: Final = {
    "attention_bias": (
        frozenset({"llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"}),
        re.compile(r"blk\.\d+\.attn_(q|k|v|output)\.bias"),
    ),
    "mlp_bias": (frozenset({"llama"}), re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias")),
}
# The texts of tokens that end a turn or a document; llama.cpp stops at each of them, whatever kind the file gives it.
END_TEXTS: Final = frozenset(
    {
        "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<|eom_id|>",
        "<EOT>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip


def _unserved(what: str) -> CheckpointError:
    return CheckpointError(f"The file {what}, which is not served; give the model as safetensors.")


def _senseless(what: str) -> CheckpointError:
    return CheckpointError(f"The file {what}; convert the model again.")


def configuration(header: GgufHeader) -> dict[str, Any]:
    """The content of a `config.json` for the file.

    Raises:
        CheckpointError: this architecture, or a setting of the file, is not served, or the file does not say how large
            the model is.
    """
    architecture = header.architecture
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"GGUF files of the architecture {architecture!r} are not served; give the model as safetensors, or one of "
            f"these: {', '.join(_ARCHITECTURES)}."
        )
    model_type, row = _ARCHITECTURES[architecture]
    settings = {
        name: value
        for key, value in header.metadata.items()
        if key.startswith(f"{architecture}.") and not _is_idle(name := key.removeprefix(f"{architecture}."), value)
    }
    rows: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    names = {
        **{key: name for key, name in rows[row].items() if name},
        **_MORE_KEYS[""],
        **_MORE_KEYS.get(model_type, {}),
    }
    names.pop("rope.dimension_count", None)
    found: dict[str, Any] = {
        **GGUF_CONFIG_DEFAULTS_MAPPING.get(row, {}),
        "model_type": model_type,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ())),
    }
    for key, name in names.items():
        if key in settings:
            found[name] = _of_all_blocks(f"{architecture}.{key}", settings[key])
    for key, name in rows["tokenizer"].items():
        if (token_id := token_id_of(header.metadata, f"tokenizer.{key}")) is not None:
            found[name] = token_id
    if model_type == "llama" and "sliding_window" in found:
        found["model_type"] = "mistral"  # GGUF files of Mistral models have the architecture llama
    _check_sizes(found, header)
    _add_defaults(found)
    _check_heads(found, settings, architecture)
    _add_score_scale(found)
    _add_windows(found, settings)
    scaling = _rotary_scaling(header, settings, architecture)
    if scaling:
        found["rope_scaling"] = scaling
    _add_biases(found, header)
    _refuse_others(settings, names.keys() | _OWN_KEYS | _NOTES, architecture)
    return found


def _of_all_blocks(key: str, value: Any) -> Any:
    """The value of a setting that a file may give for each block; all blocks must have the same one."""
    if not isinstance(value, list):
        return value
    if not value or any(each != value[0] for each in value):
        raise _unserved(f"gives blocks different values of {key}")
    return value[0]


def _refuse_others(settings: Mapping[str, Any], known: Iterable[str], architecture: str) -> None:
    others = sorted(
        key for key in settings if key not in set(known) and not key.startswith(("rope.scaling.", "rope.scale_"))
    )
    if "expert_count" in others:
        raise _unserved(f"is a mixture of experts of the architecture {architecture!r}, such as Mixtral")
    if others:
        raise _unserved(f"sets {architecture}.{others[0]}, by which answers may change")


def _is_idle(key: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in _WITHOUT_EFFECT.get(key, ())


def _check_sizes(found: Mapping[str, Any], header: GgufHeader) -> None:
    absent = [name for name in _SIZES if not isinstance(found.get(name), int) or found[name] < 1]
    if absent:
        raise _senseless(f"does not say the model's {absent[0]}")
    numbers = {int(match["block"]) for name in header.tensors if (match := _BLOCK.match(name))}
    num_blocks = found["num_hidden_layers"]
    if (block := next((each for each in range(num_blocks) if each not in numbers), None)) is not None:
        raise _senseless(f"promises {num_blocks} blocks and has no weights of block {block}")
    if not isinstance(found.get("rms_norm_eps"), float):
        raise _senseless("does not say the model's rms_norm_eps")
    num_tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
    embedding = header.tensors.get("token_embd.weight")
    num_rows = num_tokens if embedding is None else embedding.shape[0]
    if not num_tokens == num_rows == found["vocab_size"]:
        raise _senseless(
            f"lists {num_tokens} tokens, has {num_rows} rows of embeddings and a vocabulary of {found['vocab_size']}"
        )


def _add_defaults(found: dict[str, Any]) -> None:
    """Adds what llama.cpp takes where a file says nothing; transformers' defaults belong to one model each."""
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("rope_theta", 10000.0)
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])


def _check_heads(found: Mapping[str, Any], settings: Mapping[str, Any], architecture: str) -> None:
    heads, kv_heads, head_dim = (found[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if not all(type(each) is int and each > 0 for each in (kv_heads, head_dim)) or heads % kv_heads:
        raise _senseless(f"gives {heads} heads {kv_heads} heads of keys, each of {head_dim} numbers")
    for key in ("rope.dimension_count", "attention.value_length"):
        if settings.get(key, head_dim) != head_dim:
            raise _unserved(f"sets {architecture}.{key} to {settings[key]} where keys have {head_dim} numbers")
    if found["model_type"] == "qwen2" and heads * head_dim != found["hidden_size"]:
        raise _unserved(f"has {heads} heads of {head_dim} numbers in a qwen2 of the size {found['hidden_size']}")


def _add_score_scale(found: dict[str, Any]) -> None:
    if found["model_type"] in _WHOLE_HEADS_OF_27B:
        # The file lacks the divisor of attention scores; llama.cpp derives it from the number of blocks.
        is_27b = found["num_hidden_layers"] == _WHOLE_HEADS_OF_27B[found["model_type"]]
        per_head = found["hidden_size"] // found["num_attention_heads"]
        found["query_pre_attn_scalar"] = per_head if is_27b else found["head_dim"]


def _add_windows(found: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Says which blocks of a model have a window, if the file says more than the family's own pattern."""
    num_blocks, pattern = found["num_hidden_layers"], settings.get("attention.sliding_window_pattern")
    if found["model_type"] not in _WINDOW_PATTERNS:
        if pattern is not None:
            raise _unserved(f"sets attention.sliding_window_pattern for a {found['model_type']}")
        return
    if found["model_type"] == "gemma3_text" and not found.get("sliding_window"):
        found.pop("sliding_window", None)
        windows = [False] * num_blocks
    elif isinstance(pattern, list) and len(pattern) == num_blocks:
        windows = [bool(each) for each in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        windows = [index % pattern < pattern - 1 for index in range(num_blocks)]
    elif pattern is None:
        return
    else:
        raise _senseless("has an attention.sliding_window_pattern that makes no sense")
    found["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]


def _rotary_scaling(header: GgufHeader, settings: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The `rope_scaling` of transformers, empty where positions are not scaled."""
    if _FREQUENCY_FACTORS in header.tensors or any(".rope_factors_" in name for name in header.tensors):
        raise _unserved("keeps a rotary embedding's factors as a tensor")
    prefix = "rope.scaling."
    # A file of an older converter has only a factor, and means the type `linear`.
    scaling = {"type": "linear", "factor": settings.get("rope.scale_linear", 0.0)}
    scaling |= {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    kind, factor, attention_factor = scaling["type"], scaling["factor"] or 1.0, scaling.get("attn_factor", 1.0)
    if not all(isinstance(each, int | float) and each > 0 for each in (factor, attention_factor)):
        raise _senseless(f"has a {architecture}.{prefix}factor that makes no sense")
    if kind not in _SCALINGS:
        raise _unserved(f"has a rotary embedding of the type {kind!r}")
    known = {"type", "factor", "attn_factor", "original_context_length", "finetuned"}
    others = sorted(scaling.keys() - known)
    if attention_factor != 1.0 and kind != "yarn":
        others.append("attn_factor")
    if others:
        raise _unserved(f"sets {architecture}.{prefix}{others[0]}, by which answers may change")
    if kind == "none" or (factor == 1.0 and attention_factor == 1.0):
        return {}
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if "original_context_length" in scaling:
            found["original_max_position_embeddings"] = scaling["original_context_length"]
        if attention_factor != 1.0:
            found["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    return found


def _add_biases(found: dict[str, Any], header: GgufHeader) -> None:
    for setting, (model_types, bias) in _BIASES.items():
        if found["model_type"] in model_types:
            found[setting] = any(map(bias.fullmatch, header.tensors))


def token_id_of(metadata: Mapping[str, Any], key: str) -> int | None:
    """The token that a setting names; None also for a number that no token has, such as -1 without a sign."""
    token_id = metadata.get(key)
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", ()))
    return token_id if isinstance(token_id, int) and 0 <= token_id < num_tokens else None


def end_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: first those that the file names, then those with one of `END_TEXTS`."""
    named = [token_id_of(metadata, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    known = [token_id for token_id, text in enumerate(tokens) if text in END_TEXTS]
    return list(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))
