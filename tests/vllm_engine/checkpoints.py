"""Tiny checkpoints of what vLLM's layers know of each family."""

from pathlib import Path
from typing import Any

from tests.checkpoints import make_tiny_checkpoint

MIXTURES = frozenset({"exaone_moe", "granitemoe", "granitemoeshared", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"})

_CHANGES: dict[str, dict[str, Any]] = {
    "ernie4_5": {"use_bias": False},
    "olmoe": {"clip_qkv": None},
    # Windows in all layers or in none.
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": []},
    "stablelm": {"qk_layernorm": False},
}


def make_checkpoint(family: str, folder: Path, *, num_blocks: int = 5, **changes: Any) -> Path:
    """See `make_tiny_checkpoint`; `changes` are further fields of the configuration."""
    known = _CHANGES.get(family, {})
    if family == "qwen2":
        known = {**known, "layer_types": ["full_attention"] * num_blocks}
    return make_tiny_checkpoint(family, folder, num_blocks=num_blocks, config_changes={**known, **changes})
