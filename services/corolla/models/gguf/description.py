"""Converts a GGUF file's metadata to a configuration of transformers.

It refuses a file with a setting that its architecture's row lacks, since a model that lacks one would run and give
wrong answers. It reads no weights, but the few numbers by which some files scale a rotary embedding.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.architectures import ARCHITECTURES, SETTINGS, Architecture
from corolla.models.gguf.header import GgufHeader, GgufTensor, raw_bytes

# Keys that this module itself reads.
_OWN_KEYS: Final = frozenset(
    {
        "attention.recurrent_layers", "attention.sliding_window", "attention.sliding_window_pattern",
        "attention.value_length", "expert_gating_func", "full_attention_interval", "nextn_predict_layers",
        "rope.dimension_count",
    }
)  # fmt: skip
# Keys that llama.cpp does not read for these architectures, or not for text, and that describe how a file came about.
_NOTES: Final = frozenset(
    {"attention.layer_norm_epsilon", "rope.dimension_sections", "rope.scaling.finetuned", "tensor_data_layout"}
)
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
    "expert_gating_func": (0,),
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
_BLOCK: Final = re.compile(r"blk\.(?P<block>\d{1,6})\.(?P<name>.+)")
_PREDICTING: Final = re.compile(r"blk\.(?P<block>\d{1,6})\.nextn\.")
_SIZES: Final = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "intermediate_size",
)  # fmt: skip
_WHOLE_HEADS_OF_27B: Final = {"gemma2": 46, "gemma3_text": 62}
_SCALINGS: Final = frozenset({"none", "linear", "yarn", "longrope"})
# Which files have that only see or hear.
_PROJECTOR: Final = "clip"
# What the names of tensors begin with that only see or hear.
_SEEING: Final = ("v.", "a.", "mm.")
_FLOAT32: Final = struct.Struct("<f")
_LARGEST: Final = 3e38
_NO_NUMBERS: Final = frozenset({"rope.scaling.type", "rope.scaling.finetuned", "rope.dimension_sections"})
# What scales the frequencies of a rotary embedding, as numbers of the file: always, or by the length of a text.
_FACTORS: Final = "rope_freqs.weight"
_BY_LENGTH: Final = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
FACTORS: Final = frozenset({_FACTORS, *_BY_LENGTH.values()})
"""The tensors that `configuration` reads."""
"""The names of tensors that belong to no module, but to the configuration."""
_MOST_FACTORS: Final = 1 << 12
# The lengths of texts, in tokens, that a model of the kind of Llama 3.1 can have been trained with at first.
_LENGTHS: Final = tuple(1 << power for power in range(4, 21))
_LOW, _HIGH = 1.0, 4.0
# The texts of tokens that end a turn or a document; llama.cpp stops at each of them, whatever kind the file gives it.
END_TEXTS: Final = frozenset(
    {
        "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<|eom_id|>",
        "<EOT>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
_SPECIAL_IDS: Final = {
    "bos_token_id": "bos",
    "eos_token_id": "eos",
    "pad_token_id": "padding",
    "unk_token_id": "unknown",
}


def _unserved(what: str) -> CheckpointError:
    return CheckpointError(f"The file {what}, which is not served; give the model as safetensors.")


def _senseless(what: str) -> CheckpointError:
    return CheckpointError(f"The file {what}; convert the model again.")


def row_of(header: GgufHeader) -> Architecture:
    """The row of the file's architecture.

    Raises:
        CheckpointError: this architecture is not served.
    """
    architecture = header.architecture
    if architecture == _PROJECTOR:
        raise CheckpointError(
            "The file holds what turns images or sounds into inputs of a model (mmproj), and no model; give the file "
            "of the language model, which lies next to it."
        )
    if any(name.startswith(_SEEING) for name in header.tensors):
        raise CheckpointError(
            "The file holds what turns images or sounds into inputs next to its model, as Ollama's files do, which "
            "leave out settings of the model; give a file that llama.cpp's converter wrote."
        )
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"GGUF files of the architecture {architecture[:60]!r} are not served; give the model as safetensors, or "
            f"one of these: {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[architecture].variant(_settings(header))


def blocks_of(header: GgufHeader) -> tuple[int, int]:
    """The number of the model's blocks, and the number of all blocks: some only predict further tokens."""
    settings = _settings(header)
    count, further = settings.get("block_count", 0), settings.get("nextn_predict_layers", 0)
    if type(count) is not int or type(further) is not int or not 0 <= further < count:
        return 0, 0
    return count - further, count


def with_queries(header: GgufHeader) -> GgufHeader:
    """The header, with queries, keys and values as tensors of their own where the model has them so and files do not.

    Raises:
        CheckpointError: see `row_of`.
    """
    if not row_of(header).joins_queries:
        return header
    settings = _settings(header)
    heads = settings.get("attention.head_count", 0)
    of_keys = settings.get("attention.head_count_kv", heads)
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        match = _BLOCK.fullmatch(name)
        before, joined, ending = name.rpartition("attn_qkv.")
        num_rows = tensor.shape[0]
        if match is None or not joined or not _shares(heads, of_keys, num_rows):
            tensors[name] = tensor
            continue
        head_bytes, head_rows = tensor.num_bytes // (heads + 2 * of_keys), num_rows // (heads + 2 * of_keys)
        first = 0
        for part, count in (("attn_q", heads), ("attn_k", of_keys), ("attn_v", of_keys)):
            tensors[f"{before}{part}.{ending}"] = replace(
                tensor, shape=(count * head_rows, *tensor.shape[1:]), offset=tensor.offset + first * head_bytes,
                num_bytes=count * head_bytes,
            )  # fmt: skip
            first += count
    return replace(header, tensors=tensors)


def _shares(heads: Any, of_keys: Any, num_rows: int) -> bool:
    """Whether rows are those of so many heads of queries, and of keys and values, of one size."""
    are_counts = all(type(each) is int and each > 0 for each in (heads, of_keys))
    return are_counts and num_rows % (heads + 2 * of_keys) == 0


def configuration(header: GgufHeader) -> dict[str, Any]:
    """The content of a `config.json` for the file.

    Raises:
        CheckpointError: this architecture, or a setting of the file, is not served, or the file does not say how large
            the model is.
    """
    row, settings, architecture = row_of(header), _settings(header), header.architecture
    names = {**SETTINGS, **row.settings}
    found: dict[str, Any] = {
        **row.unless_said,
        "model_type": row.model_type,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens", ())),
    }
    num_blocks, _ = blocks_of(header)
    kinds = _kinds(row, settings, min(num_blocks, len(header.tensors)))
    for key, name in names.items():
        if key in settings and name:
            found[name] = _of_all_blocks(f"{architecture}.{key}", settings[key], kinds)
    found |= row.implied
    found |= {
        name: token_id_of(header.metadata, f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_IDS.items()
    }
    if "num_hidden_layers" in found:
        found["num_hidden_layers"] = num_blocks
    _check_sizes(found, header, row)
    _check_numbers(settings, architecture)
    _add_defaults(found)
    if kinds is not None:
        found["layer_types"] = kinds
    if "kv_lora_rank" in found:
        _add_latents(found, settings)
    else:
        _check_heads(found, settings, row, architecture)
    if "ssm.inner_size" in row.settings:
        _add_states(found, settings)
    _add_score_scale(found, row)
    _add_windows(found, settings, row, architecture)
    _check_gating(settings, row, architecture)
    scaling = _rotary_scaling(header, found, settings, row)
    if scaling:
        found["rope_scaling"] = scaling
    if row.scales_whole:
        plain = {"rope_type": "default", "rope_theta": found.pop("rope_theta")}
        found["rope_parameters"] = {
            "full_attention": {**plain, **found.pop("rope_scaling", {})},
            "sliding_attention": plain,
        }
    if scaling.get("rope_type") == "longrope":
        found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    held = {match["name"] for name in header.tensors if (match := _BLOCK.fullmatch(name))}
    found |= {name: any(f"{stored}.bias" in held for stored in each) for name, each in row.biases.items()}
    found |= {name: any(f"{stored}.weight" in held for stored in each) for name, each in row.presences.items()}
    _refuse_others(settings, names.keys() | _OWN_KEYS | _NOTES, architecture)
    return found


def _settings(header: GgufHeader) -> dict[str, Any]:
    """The settings of the file's architecture that have an effect, by their names after the architecture's."""
    prefix = f"{header.architecture}."
    return {
        name: _as_written(value)
        for key, value in header.metadata.items()
        if key.startswith(prefix)
        and not _is_idle(name := key.removeprefix(prefix), value)
        # Blocks with a window have a base of their own only where it is another one.
        and (name != "rope.freq_base_swa" or value != header.metadata.get(f"{prefix}rope.freq_base"))
    }


def _as_written(value: Any) -> Any:
    """The number of the fewest digits that a file would store likewise, so that 0.3 is not 0.30000001."""
    if isinstance(value, list):
        return [_as_written(each) for each in value]
    if not isinstance(value, float) or not abs(value) < _LARGEST:
        return value
    tries = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((each for each in tries if _FLOAT32.pack(each) == _FLOAT32.pack(value)), value)


def _is_idle(key: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in _WITHOUT_EFFECT.get(key, ())


def _of_all_blocks(key: str, value: Any, kinds: Sequence[str] | None) -> Any:
    """The value of a setting that a file may give for each block; all blocks must have the same one.

    Args:
        kinds: what blocks are; if there are several kinds, blocks without keys and values may have 0.
    """
    if not isinstance(value, list):
        return value
    others = value if kinds is None else [each for each in value if each != 0]
    if not others or any(each != others[0] for each in others):
        raise _unserved(f"gives blocks different values of {key}")
    return others[0]


def _kinds(row: Architecture, settings: Mapping[str, Any], count: int) -> list[str] | None:
    """What each block is, in a model of blocks with and without keys and values; None: all blocks have some."""
    if row.kinds is None:
        return None
    without, with_ = row.kinds
    recurrent, heads = settings.get("attention.recurrent_layers"), settings.get("attention.head_count_kv")
    if isinstance(recurrent, list) and len(recurrent) >= count:
        states = [bool(each) for each in recurrent[:count]]
    elif isinstance(heads, list) and len(heads) >= count:
        states = [each == 0 for each in heads[:count]]
    else:
        interval = settings.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise _senseless("has a full_attention_interval that makes no sense")
        states = [(block + 1) % interval != 0 for block in range(count)]
    return [without if state else with_ for state in states]


def _refuse_others(settings: Mapping[str, Any], known: Iterable[str], architecture: str) -> None:
    others = sorted(
        key for key in settings if key not in set(known) and not key.startswith(("rope.scaling.", "rope.scale_"))
    )
    if others:
        raise _unserved(f"sets {architecture}.{others[0]}, by which answers may change")


def _check_sizes(found: Mapping[str, Any], header: GgufHeader, row: Architecture) -> None:
    absent = [name for name in _SIZES if type(found.get(name)) is not int or found[name] < 1]
    if absent:
        raise _senseless(f"does not say the model's {absent[0]}")
    numbers = {int(match["block"]) for name in header.tensors if (match := _BLOCK.match(name))}
    promised = found["num_hidden_layers"]
    if (block := next((each for each in range(promised) if each not in numbers), None)) is not None:
        raise _senseless(f"promises {promised} blocks and has no weights of block {block}")
    left_out = range(*blocks_of(header))
    predicting = {int(match["block"]) for name in header.tensors if (match := _PREDICTING.match(name))}
    if (odd := next((block for block in sorted(numbers - predicting) if block in left_out), None)) is not None:
        raise _senseless(f"counts block {odd} among those that only predict further tokens, and it has no such tensors")
    if row.epsilon and not isinstance(found.get(row.epsilon), float):
        raise _senseless(f"does not say the model's {row.epsilon}")
    num_tokens = len(header.metadata.get("tokenizer.ggml.tokens", ()))
    embedding = header.tensors.get("token_embd.weight")
    num_rows = num_tokens if embedding is None else embedding.shape[0]
    if not num_tokens == num_rows == found["vocab_size"]:
        raise _senseless(
            f"lists {num_tokens} tokens, has {num_rows} rows of embeddings and a vocabulary of {found['vocab_size']}"
        )


def _check_numbers(settings: Mapping[str, Any], architecture: str) -> None:
    for key, value in settings.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if key.startswith("rope.") and key not in _NO_NUMBERS and not is_number:
            raise _senseless(f"sets {architecture}.{key} to what is no number")
    if settings.get("rope.freq_base", 1.0) <= 0:
        raise _senseless(f"sets {architecture}.rope.freq_base to {settings['rope.freq_base']}")


def _add_defaults(found: dict[str, Any]) -> None:
    """Adds what llama.cpp takes where a file says nothing; transformers' defaults belong to one model each."""
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("rope_theta", 10000.0)
    if "kv_lora_rank" not in found:
        found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])


def _add_latents(found: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Says how long the parts of queries, keys and values are that come from latents."""
    # A file of an older converter has the matrix of keys and values whole.
    ending = "_mla" if "attention.key_length_mla" in settings else ""
    names = (f"attention.key_length{ending}", f"attention.value_length{ending}", "rope.dimension_count")
    keys, values, rotated = (settings.get(name, 0) for name in names)
    if not all(type(each) is int and each > 0 for each in (keys, values, rotated)) or not rotated < keys:
        raise _senseless(f"gives keys {keys} numbers, {rotated} of them rotated, and values {values}")
    found |= {"qk_rope_head_dim": rotated, "qk_nope_head_dim": keys - rotated, "v_head_dim": values}
    found["num_key_value_heads"] = found["num_attention_heads"]
    if "linear_head_dim" in found:
        found["linear_num_heads"] = found["num_attention_heads"]
    if found["model_type"] == "deepseek_v2":
        found["topk_method"] = "greedy" if found["n_group"] == 1 else "group_limited_greedy"


def _add_states(found: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Says how long the values of a recurrent state are."""
    inner, heads, groups = (settings.get(f"ssm.{name}", 0) for name in ("inner_size", "time_step_rank", "group_count"))
    if not all(type(each) is int and each > 0 for each in (inner, heads, groups)) or inner % heads or heads % groups:
        raise _senseless(f"has {heads} heads of values for {groups} heads of keys, of {inner} numbers together")
    if "mamba_n_heads" not in found:
        found["linear_value_head_dim"] = inner // heads
        return
    if inner % found["hidden_size"]:
        raise _senseless(f"has states of {inner} numbers in a model of the size {found['hidden_size']}")
    found |= {"mamba_expand": inner // found["hidden_size"], "mamba_d_head": inner // heads}
    is_rotated = settings.get("rope.scaling.finetuned", True)
    found["position_embedding_type"] = "rope" if is_rotated else "nope"


def _check_heads(found: dict[str, Any], settings: Mapping[str, Any], row: Architecture, architecture: str) -> None:
    heads, kv_heads, head_dim = (found[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if not all(type(each) is int and each > 0 for each in (kv_heads, head_dim)) or heads % kv_heads:
        raise _senseless(f"gives {heads} heads {kv_heads} heads of keys, each of {head_dim} numbers")
    rotated = settings.get("rope.dimension_count", head_dim)
    if row.rotates_part:
        if type(rotated) is not int or not 0 < rotated <= head_dim or int(head_dim * (rotated / head_dim)) != rotated:
            raise _senseless(f"rotates {rotated} of the {head_dim} numbers of a head")
        found["partial_rotary_factor"] = rotated / head_dim
        settings = {**settings, "rope.dimension_count": head_dim}
    for key in ("rope.dimension_count", "attention.value_length"):
        if settings.get(key, head_dim) != head_dim:
            raise _unserved(f"sets {architecture}.{key} to {settings[key]} where keys have {head_dim} numbers")
    if found["model_type"] == "qwen2" and heads * head_dim != found["hidden_size"]:
        raise _unserved(f"has {heads} heads of {head_dim} numbers in a qwen2 of the size {found['hidden_size']}")


def _add_score_scale(found: dict[str, Any], row: Architecture) -> None:
    if found["model_type"] in _WHOLE_HEADS_OF_27B:
        # The file lacks the divisor of attention scores; llama.cpp derives it from the number of blocks.
        is_27b = found["num_hidden_layers"] == _WHOLE_HEADS_OF_27B[found["model_type"]]
        per_head = found["hidden_size"] // found["num_attention_heads"]
        found["query_pre_attn_scalar"] = per_head if is_27b else found["head_dim"]
    if (scale := row.settings.get("attention.scale")) is not None:
        found.setdefault(scale, found["head_dim"] ** -0.5)


def _add_windows(found: dict[str, Any], settings: Mapping[str, Any], row: Architecture, architecture: str) -> None:
    """Says which blocks of a model have a window."""
    count, pattern = found["num_hidden_layers"], settings.get("attention.sliding_window_pattern", row.pattern)
    window = settings.get("attention.sliding_window")
    if row.pattern is None and pattern is not None:
        raise _unserved(f"sets attention.sliding_window_pattern for a {found['model_type']}")
    if window is not None:
        if not row.has_windows or type(window) is not int:
            raise _unserved(f"sets {architecture}.attention.sliding_window")
        found["sliding_window"] = window
    if row.pattern is None:
        return
    if window is None:
        windows = [False] * count
    elif isinstance(pattern, list) and len(pattern) >= count:
        windows = [bool(each) for each in pattern[:count]]
    elif type(pattern) is int and pattern > 0:
        windows = [index % pattern < pattern - 1 for index in range(count)]
    else:
        raise _senseless("has an attention.sliding_window_pattern that makes no sense")
    found["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in windows]


def _check_gating(settings: Mapping[str, Any], row: Architecture, architecture: str) -> None:
    gating = settings.get("expert_gating_func", row.gating)
    if gating != row.gating and "expert_count" in settings:
        raise _unserved(f"sets {architecture}.expert_gating_func to {gating}")


def _rotary_scaling(
    header: GgufHeader, found: Mapping[str, Any], settings: Mapping[str, Any], row: Architecture
) -> dict[str, Any]:
    """The `rope_scaling` of transformers, empty where positions are not scaled."""
    prefix = "rope.scaling."
    # A file of an older converter has only a factor, and means the type `linear`.
    stated = {"type": "linear", "factor": settings.get("rope.scale_linear", 0.0)}
    stated |= {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    kind, factor, attention_factor = stated["type"], stated["factor"] or 1.0, stated.get("attn_factor", 1.0)
    if not all(isinstance(each, int | float) and each > 0 for each in (factor, attention_factor)):
        raise _senseless(f"has a {header.architecture}.{prefix}factor that makes no sense")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise _unserved(f"has a rotary embedding of the type {kind!r}")
    by_length = {name: header.tensors[stored] for name, stored in _BY_LENGTH.items() if stored in header.tensors}
    is_long = kind == "longrope" or bool(by_length)
    known = {"type", "factor", "attn_factor", "original_context_length", "finetuned"}
    known |= {key.removeprefix(prefix) for key in row.settings if key.startswith(prefix)}
    known |= {"yarn_attn_factor"} if kind == "yarn" else set()
    others = sorted(stated.keys() - known)
    if attention_factor != 1.0 and kind != "yarn" and not is_long:
        others.append("attn_factor")
    if others:
        raise _unserved(f"sets {header.architecture}.{prefix}{others[0]}, by which answers may change")
    if is_long:
        return _long_rope(found, by_length, stated)
    is_scaled = kind != "none" and (factor != 1.0 or attention_factor != 1.0)
    if (tensor := header.tensors.get(_FACTORS)) is not None:
        if is_scaled:
            raise _unserved("scales its rotary embedding by a setting and by a tensor")
        return _llama3(_numbers(tensor), found)
    return _stated_scaling(kind, factor, stated, settings, row) if is_scaled else {}


def _stated_scaling(
    kind: str, factor: float, stated: Mapping[str, Any], settings: Mapping[str, Any], row: Architecture
) -> dict[str, Any]:
    found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if "original_context_length" in stated:
            found["original_max_position_embeddings"] = stated["original_context_length"]
        if (whole := stated.get("yarn_attn_factor")) is not None:
            found["attention_factor"] = whole
        if stated.get("attn_factor", 1.0) != 1.0:
            found["attention_factor"] = stated["attn_factor"] * (0.1 * math.log(factor) + 1.0)
        found |= _yarn_of(row, stated, settings)
    return found


def _yarn_of(row: Architecture, stated: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an architecture's own settings say of a rotary embedding of the type `yarn`."""
    found: dict[str, Any] = {}
    if row.model_type == "gpt_oss":
        found["truncate"] = False
    if (multiplier := stated.get("yarn_log_multiplier")) is not None:
        # The converter of DeepSeek's models stores a tenth.
        scale = round(multiplier * 10, 6) if "attention.kv_lora_rank" in row.settings else multiplier
        found |= {"mscale": scale, "mscale_all_dim": scale}
    for side in ("fast", "slow"):
        if (beta := stated.get(f"yarn_beta_{side}")) is not None:
            found[f"beta_{side}"] = beta
    if (beta := settings.get("attention.temperature_scale")) is not None:
        found["llama_4_scaling_beta"] = beta
    return found


def _numbers(tensor: GgufTensor) -> list[float]:
    """The numbers of a small tensor."""
    if tensor.type_name != "F32" or len(tensor.shape) != 1 or tensor.num_weights > _MOST_FACTORS:
        raise _senseless("has no list of numbers for its rotary embedding, but a tensor of another kind")
    numbers = [number for (number,) in _FLOAT32.iter_unpack(raw_bytes(tensor, 0, tensor.num_bytes))]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise _senseless("scales its rotary embedding by numbers that make no sense")
    return numbers


def _num_rotated(found: Mapping[str, Any]) -> int:
    if "qk_rope_head_dim" in found:
        return int(found["qk_rope_head_dim"])
    return int(found["head_dim"] * found.get("partial_rotary_factor", 1.0))


def _llama3(factors: Sequence[float], found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Llama 3.1 and later whose factors these are; none if they scale nothing."""
    if all(factor == 1.0 for factor in factors):
        return {}
    rotated = _num_rotated(found)
    if len(factors) != rotated // 2:
        raise _senseless(f"has {len(factors)} factors of a rotary embedding of {rotated} numbers")
    lengths = [2 * math.pi * found["rope_theta"] ** (2 * index / rotated) for index in range(rotated // 2)]
    most = _as_written(max(factors))
    for trained in _LENGTHS:
        shares = (min(max((trained / length - _LOW) / (_HIGH - _LOW), 0.0), 1.0) for length in lengths)
        made = (1 / ((1 - share) / most + share) for share in shares)
        if all(math.isclose(own, factor, rel_tol=1e-4) for own, factor in zip(made, factors, strict=True)):
            return {
                "rope_type": "llama3", "factor": most, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
                "original_max_position_embeddings": trained,
            }  # fmt: skip
    raise _unserved(f"scales its rotary embedding in {_FACTORS} otherwise than Llama 3.1 does")


def _long_rope(
    found: Mapping[str, Any], by_length: Mapping[str, GgufTensor], stated: Mapping[str, Any]
) -> dict[str, Any]:
    """A rotary embedding with other factors for long texts than for short ones."""
    trained, longest = stated.get("original_context_length"), found["max_position_embeddings"]
    if len(by_length) != len(_BY_LENGTH) or type(trained) is not int or not 1 < trained <= longest:
        raise _senseless("does not say by which factors it scales its rotary embedding, and from which length on")
    factors = {name: _numbers(tensor) for name, tensor in by_length.items()}
    if any(len(each) != _num_rotated(found) // 2 for each in factors.values()):
        raise _senseless("has factors of a rotary embedding of another size")
    scaled = {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        **{name: _as_written(numbers) for name, numbers in factors.items()},
    }
    usual = math.sqrt(1 + math.log(longest / trained) / math.log(trained))
    if not math.isclose(stated.get("attn_factor", usual), usual, rel_tol=1e-5):
        scaled["attention_factor"] = stated["attn_factor"]
    return scaled


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
