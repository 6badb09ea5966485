"""Mistral's own format of checkpoints: `params.json`, and `consolidated` files of safetensors. Pure.

Names of settings and tensors are those of the public repositories mistral-inference and vLLM, which read such files. In
their attention the two numbers that are rotated together lie next to each other; in transformers, half a head apart.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from corolla.chassis.errors import CheckpointError, UnsupportedFamily

PARAMS_FILE: Final = "params.json"

_SETTINGS: Final = {
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "vocab_size": "vocab_size",
}
# Settings with these values change nothing. Corolla does not read the parts that see.
_DEFAULTS: Final = {"activation": "silu", "causal": True, "model_type": "transformer", "use_biases": False}
_WITHOUT_EFFECT: Final = frozenset({"dtype", "max_position_embeddings", "max_seq_len", "rope_theta", "vision_encoder"})
_CONTEXT_LENGTH: Final = 128_000
_PARTS: Final = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "ffn_norm": "post_attention_layernorm",
}
_ENDS: Final = {
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "tok_embeddings.weight": "model.embed_tokens.weight",
}
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_ROTATED: Final = re.compile(r"layers\.\d+\.attention\.w[qk]\.weight")


def settings_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the form of `config.json`.

    Args:
        params: the content of `params.json`.

    Raises:
        UnsupportedFamily: the model is of another kind than a dense one with keys and values.
        CheckpointError: a setting is not known here, or is missing.
    """
    for name, what in (("moe", "experts"), ("q_lora_rank", "latents"), ("quantization", "quantised weights")):
        if params.get(name):
            raise UnsupportedFamily(
                f"Models of {PARAMS_FILE} are not supported: {what} in Mistral's own format ({name}); give the model "
                "in transformers' format."
            )
    left = {
        name: value
        for name, value in params.items()
        if name not in {*_SETTINGS, *_WITHOUT_EFFECT, "yarn", "llama_4_scaling"} and value != _DEFAULTS.get(name)
    }
    if left:
        raise CheckpointError(
            f"{PARAMS_FILE} sets {min(left)[:40]}, which is not known here; give the model in transformers' format."
        )
    settings = {new: params[old] for old, new in _SETTINGS.items() if params.get(old) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _CONTEXT_LENGTH
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10_000.0)}
    if yarn := params.get("yarn"):
        rope |= _yarn(yarn, params.get("llama_4_scaling"))
    elif params.get("llama_4_scaling"):
        raise CheckpointError(f"{PARAMS_FILE} sets llama_4_scaling without yarn, which is not known here.")
    return {
        "sliding_window": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **settings,
        "model_type": "ministral3" if "llama_4_scaling_beta" in rope else "mistral",
        "max_position_embeddings": length, "rope_parameters": rope,
    }  # fmt: skip


def _yarn(yarn: Any, scaling: Any) -> dict[str, Any]:
    names = {
        "alpha": "beta_slow", "beta": "beta_fast", "factor": "factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
    }  # fmt: skip
    if not isinstance(yarn, Mapping) or set(yarn) != {*names, "apply_scale"} or yarn["apply_scale"] is not False:
        raise CheckpointError(f"{PARAMS_FILE} sets a yarn that scales attention, or more, which is not known here.")
    rope = {"rope_type": "yarn", "attention_factor": 1.0, **{new: yarn[old] for old, new in names.items()}}
    if scaling is None:
        return rope
    length = "original_max_position_embeddings"
    if not isinstance(scaling, Mapping) or set(scaling) != {"beta", length} or scaling[length] != yarn[length]:
        raise CheckpointError(f"{PARAMS_FILE} sets another llama_4_scaling than is known here.")
    return {**rope, "llama_4_scaling_beta": scaling["beta"]}


def model_names(stored: Iterable[str]) -> dict[str, str]:
    """Maps the names of tensors in transformers to those in Mistral's files."""
    return {_model_name(each): each for each in stored}


def _model_name(stored: str) -> str:
    match = _LAYER.fullmatch(stored)
    if match is not None and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.weight"
    return _ENDS.get(stored, stored)


def is_rotated(stored: str) -> bool:
    """Tells if the rows of a tensor are the numbers that are rotated, which lie in another order here."""
    return _ROTATED.fullmatch(stored) is not None
