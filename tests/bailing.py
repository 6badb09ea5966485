"""Checkpoints of `bailing_moe_v2` (Ling), and what the code that comes with them computes.

Names of settings and tensors, and the computation, are those of the publisher's modeling_bailing_moe_v2.py, as public
repositories show it (inclusionAI/Ling-mini-2.0); transformers has no class for the type.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

_PARTS = {
    "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm", "gate.e_score_correction_bias": "gate.expert_bias",
    "model.embed_tokens": "model.word_embeddings",
}  # fmt: skip
_SETTINGS = {
    "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias",
}  # fmt: skip


def write_bailing(source: Path, folder: Path) -> None:
    """Writes a checkpoint of glm4_moe as one of this type, in one file."""
    held: dict[str, Tensor] = {}
    for shard in source.glob("*.safetensors"):
        held |= load_file(shard)
    tensors: dict[str, Tensor] = {}
    for name, tensor in held.items():
        start, _, part = name.partition(".self_attn.")
        if part in ("k_proj.weight", "v_proj.weight"):
            continue
        if part == "q_proj.weight":
            rows = [held[f"{start}.self_attn.{each}_proj.weight"] for each in "qkv"]
            tensors[f"{start}.attention.query_key_value.weight"] = torch.cat(rows)
            continue
        for own, published in _PARTS.items():
            name = name.replace(own, published)
        tensors[name] = tensor
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    settings = {_SETTINGS.get(name, name): value for name, value in config.items()}
    settings |= {
        "model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"], "rope_scaling": None,
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"],
        "score_function": "sigmoid", "use_qk_norm": True, "use_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))


@torch.no_grad()
def bailing_logits(folder: Path, token_ids: list[int]) -> Tensor:
    """The logits of the token that follows, `[V]` in float32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    held = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    hidden = held["model.word_embeddings.weight"][torch.tensor(token_ids)]
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        weights = {name.removeprefix(start): each for name, each in held.items() if name.startswith(start)}
        hidden = hidden + _attention(weights, _normed(hidden, weights["input_layernorm.weight"], config), config)
        normed = _normed(hidden, weights["post_attention_layernorm.weight"], config)
        is_dense = layer < config["first_k_dense_replace"]
        hidden = hidden + (_mlp(weights, "mlp", normed) if is_dense else _mixture(weights, normed, config))
    return functional.linear(_normed(hidden[-1], held["model.norm.weight"], config), held["lm_head.weight"])


def _normed(hidden: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])


def _attention(weights: dict[str, Tensor], hidden: Tensor, config: dict[str, Any]) -> Tensor:
    heads, key_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    joined = functional.linear(hidden, weights["attention.query_key_value.weight"]).view(len(hidden), -1, size)
    query, key, value = torch.split(joined.transpose(0, 1), [heads, key_heads, key_heads])
    query = _rotated(_normed(query, weights["attention.query_layernorm.weight"], config), config)
    key = _rotated(_normed(key, weights["attention.key_layernorm.weight"], config), config)
    key, value = (each.repeat_interleave(heads // key_heads, dim=0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * size**-0.5
    unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    output = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ value
    return functional.linear(output.transpose(0, 1).flatten(1), weights["attention.dense.weight"])


def _rotated(heads: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotates the first numbers of each head, those half the rotated size apart together."""
    size = int(config["head_dim"] * config["partial_rotary_factor"])
    frequencies = config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(heads.shape[1]).float(), frequencies)
    first, second, rest = heads[..., : size // 2], heads[..., size // 2 : size], heads[..., size:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _mlp(weights: dict[str, Tensor], place: str, hidden: Tensor) -> Tensor:
    gate, up = (functional.linear(hidden, weights[f"{place}.{each}_proj.weight"]) for each in ("gate", "up"))
    return functional.linear(functional.silu(gate) * up, weights[f"{place}.down_proj.weight"])


def _mixture(weights: dict[str, Tensor], hidden: Tensor, config: dict[str, Any]) -> Tensor:
    scores = functional.linear(hidden, weights["mlp.gate.weight"]).sigmoid()
    biased = (scores + weights["mlp.gate.expert_bias"]).view(len(hidden), config["n_group"], -1)
    best = biased.topk(2, dim=-1)[0].sum(-1).topk(config["topk_group"], dim=-1)[1]
    left_out = torch.ones(biased.shape[:2], dtype=torch.bool).scatter(1, best, False)
    chosen = biased.masked_fill(left_out[..., None], -torch.inf).flatten(1).topk(config["num_experts_per_tok"])[1]
    shares = scores.gather(1, chosen)
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * config["routed_scaling_factor"]
    output = _mlp(weights, "mlp.shared_experts", hidden)
    for row, (experts, row_shares) in enumerate(zip(chosen.tolist(), shares, strict=True)):
        for expert, share in zip(experts, row_shares, strict=True):
            output[row] += share * _mlp(weights, f"mlp.experts.{expert}", hidden[row])
    return output
