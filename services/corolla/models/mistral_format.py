"""Mistral's own format of checkpoints: `params.json`, and `consolidated` files of safetensors. Pure.

Names of settings and tensors are those of the public repositories mistral-inference and vLLM, which read such files. In
their attention the two numbers that are rotated together lie next to each other; in transformers, half a head apart.
"""

import re
from collections.abc import Collection, Iterable, Mapping
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
_OF_LATENTS: Final = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_EXPERTS: Final = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
# Settings with these values change nothing. Corolla does not read the parts that see.
_DEFAULTS: Final = {"activation": "silu", "causal": True, "model_type": "transformer", "use_biases": False}
_DEFAULTS_OF_EXPERTS: Final = {"expert_model_parallel": 1, "expert_parallel": 1, "route_every_n": 1}
_WITHOUT_EFFECT: Final = frozenset({"dtype", "max_position_embeddings", "max_seq_len", "rope_theta", "vision_encoder"})
# Settings that are read one by one.
_SPECIAL: Final = frozenset({"llama_4_scaling", "moe", "quantization", "yarn"})
_CONTEXT_LENGTH: Final = 128_000
_PARTS: Final = {
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wk": "self_attn.k_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wv": "self_attn.v_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate",
}
_PARTS_OF_MLP: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MLP: Final = re.compile(r"(?:feed_forward|(experts\.\d+|shared_experts))\.(w[123])")
# The ends of names: weights, and the scales of eight-bit weights and of what is multiplied by them.
_ENDINGS: Final = {"weight": "weight", "qscale_act": "input_scale", "qscale_weight": "weight_scale"}
_CACHE_SCALE: Final = re.compile(r"layers\.(\d+)\.attention\.(q|k|v|kv)_fake_quantizer\.qscale_act")
_ENDS: Final = {
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "tok_embeddings.weight": "model.embed_tokens.weight",
}
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)\.(\w+)")
_ROTATED: Final = re.compile(r"layers\.\d+\.attention\.w[qk]\.weight")


def settings_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the form of `config.json`.

    Args:
        params: the content of `params.json`.

    Raises:
        UnsupportedFamily: the model has experts or quantised weights without latents, or latents without experts.
        CheckpointError: a setting is not known here, or is missing.
    """
    latents = {name: params[name] for name in _OF_LATENTS if params.get(name) is not None}
    experts = params.get("moe") or {}
    if bool(latents) != bool(experts):
        what, other = ("latents", "experts") if latents else ("experts", "latents")
        raise UnsupportedFamily(
            f"Models of {PARAMS_FILE} are not supported: {what} without {other} in Mistral's own format; give the "
            "model in transformers' format."
        )
    if params.get("quantization") and not latents:
        # The scales of the rows that are rotated would have to be moved with them.
        raise UnsupportedFamily(
            f"Models of {PARAMS_FILE} are not supported: quantised weights of a dense model in Mistral's own format; "
            "give the model in transformers' format."
        )
    _refuse_unknown(params, {*_SETTINGS, *_WITHOUT_EFFECT, *_OF_LATENTS, *_SPECIAL}, _DEFAULTS)
    settings = {new: params[old] for old, new in _SETTINGS.items() if params.get(old) is not None}
    length = params.get("max_position_embeddings") or params.get("max_seq_len") or _CONTEXT_LENGTH
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10_000.0)}
    if yarn := params.get("yarn"):
        rope |= _yarn(yarn, params.get("llama_4_scaling"))
    elif params.get("llama_4_scaling"):
        raise CheckpointError(f"{PARAMS_FILE} sets llama_4_scaling without yarn, which is not known here.")
    settings = {
        "sliding_window": None, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **settings,
        "model_type": "ministral3" if "llama_4_scaling_beta" in rope else "mistral",
        "max_position_embeddings": length, "rope_parameters": rope, **_quantization(params.get("quantization")),
    }  # fmt: skip
    if not latents:
        return settings
    if len(latents) < len(_OF_LATENTS) or not isinstance(experts, Mapping) or "llama_4_scaling_beta" not in rope:
        raise CheckpointError(f"{PARAMS_FILE} does not set all of {', '.join(_OF_LATENTS)}, moe and llama_4_scaling.")
    _refuse_unknown(experts, _OF_EXPERTS, _DEFAULTS_OF_EXPERTS)
    of_experts = {new: experts[old] for old, new in _OF_EXPERTS.items() if old in experts}
    # The size of a head is that of the parts.
    del settings["sliding_window"]
    settings.pop("head_dim", None)
    return {**settings, **latents, **of_experts, "model_type": "mistral4"}


def _refuse_unknown(stored: Mapping[str, Any], known: Collection[str], defaults: Mapping[str, Any]) -> None:
    left = [name for name, value in stored.items() if name not in known and value != defaults.get(name)]
    if left:
        raise CheckpointError(
            f"{PARAMS_FILE} sets {min(left)[:40]}, which is not known here; give the model in transformers' format."
        )


def _quantization(stored: Any) -> dict[str, Any]:
    if not stored:
        return {}
    if not isinstance(stored, Mapping) or stored.get("qformat_weight") != "fp8_e4m3":
        raise CheckpointError(
            f"{PARAMS_FILE} sets a quantization that is not known here; give the model in transformers' format."
        )
    return {"quantization_config": {"quant_method": "fp8"}}


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
    if match is None or match[3] not in _ENDINGS:
        return _ENDS.get(stored, stored)
    if (scale := _CACHE_SCALE.fullmatch(stored)) is not None:
        return f"model.layers.{scale[1]}.self_attn.{scale[2]}_scale"
    part = _PARTS.get(match[2])
    if (mlp := _MLP.fullmatch(match[2])) is not None:
        part = ".".join(each for each in ("mlp", mlp[1], _PARTS_OF_MLP[mlp[2]]) if each)
    return stored if part is None else f"model.layers.{match[1]}.{part}.{_ENDINGS[match[3]]}"


def is_rotated(stored: str) -> bool:
    """Tells if the rows of a tensor are the numbers that are rotated, which lie in another order here."""
    return _ROTATED.fullmatch(stored) is not None
