"""Reads an adapter's configuration, as PEFT writes it: which modules the adapter changes, and how strongly. Pure."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from corolla.chassis.errors import AdapterError

Value = TypeVar("Value")

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 256 << 10
MAX_RANK: Final = 1024

_PLAIN_NAME: Final = re.compile(r"[\w.]+")
# Adapters with these initial weights are ordinary low-rank products. Other initialisations change the base model.
_PLAIN_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
# Fields without an effect here: the weights file lists the changed modules, and the rest is about training or origin.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "lora_dropout", "lora_ga_config", "loftq_config", "megatron_config", "megatron_core", "peft_type",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
_READ: Final = frozenset({"alpha_pattern", "bias", "lora_alpha", "r", "rank_pattern", "target_modules", "use_rslora"})
_REFUSED: Final = {
    "use_dora": "it is a DoRA adapter, which normalises the base weights; merge it into the checkpoint",
    "modules_to_save": "it replaces whole modules (modules_to_save); merge it into the checkpoint",
    "trainable_token_indices": "it changes embeddings (trainable_token_indices); merge it into the checkpoint",
    "fan_in_fan_out": "its weights are transposed (fan_in_fan_out); only linear layers of the usual layout are served",
    "lora_bias": "it has biases (lora_bias); train it without",
    "target_parameters": "it changes parameters outside of linear layers (target_parameters); merge it",
    "layer_replication": "it repeats layers of the base model (layer_replication); merge it into a checkpoint",
    "alora_invocation_tokens": "it begins to act in mid-text (alora_invocation_tokens), which is not served",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The ranks and strengths (LoRA's alpha) of an adapter's low-rank products, each of which changes one module.

    Attributes:
        rank: the rank of products that are not in `ranks`.
        alpha: the strength of products that are not in `alphas`, before it is divided by the rank.
        divides_by_root: whether strengths are divided by the square root of the rank instead (rsLoRA).
        targets: the ends of the names of changed modules; None where a pattern names the modules.
        ranks: maps the ends of modules' names to ranks.
        alphas: maps the ends of modules' names to strengths.
    """

    rank: int
    alpha: float
    divides_by_root: bool = False
    targets: frozenset[str] | None = None
    ranks: Mapping[str, int] | None = None
    alphas: Mapping[str, float] | None = None

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Reads a configuration. Raises AdapterError, with the reason, if this is not a LoRA that can be served."""
        if len(text) > MAX_CONFIG_BYTES:
            raise AdapterError(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES >> 10} KiB")
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError):
            stored = None
        if not isinstance(stored, dict):
            raise AdapterError(f"{CONFIG_FILE} is not a JSON object")
        _check_kind(stored)
        targets = stored.get("target_modules")
        is_list = isinstance(targets, list) and all(isinstance(each, str) for each in targets)
        if not is_list and not isinstance(targets, str):
            raise AdapterError("target_modules must be a list of names or a pattern")
        return cls(
            rank=_rank(stored.get("r"), "r"),
            alpha=_alpha(stored.get("lora_alpha"), "lora_alpha"),
            divides_by_root=bool(stored.get("use_rslora")),
            targets=frozenset(targets) if isinstance(targets, list) else None,
            ranks={name: _rank(rank, name) for name, rank in _patterns(stored, "rank_pattern")},
            alphas={name: _alpha(alpha, name) for name, alpha in _patterns(stored, "alpha_pattern")},
        )

    def targets_module(self, name: str) -> bool:
        """A pattern admits any module, since its evaluation might never end."""
        return self.targets is None or any(_ends_with(name, target) for target in self.targets)

    def rank_of(self, name: str) -> int:
        """The rank of a module's product."""
        return _of_pattern(self.ranks, name, self.rank)

    def scaling_of(self, name: str) -> float:
        """The factor by which a module's product is multiplied."""
        rank, alpha = self.rank_of(name), _of_pattern(self.alphas, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.divides_by_root else rank)


def _check_kind(stored: Mapping[str, Any]) -> None:
    if stored.get("peft_type") != "LORA":
        raise AdapterError("it is not a LoRA adapter (peft_type); only those are served")
    for name, sentence in _REFUSED.items():
        if stored.get(name):
            raise AdapterError(sentence)
    if stored.get("bias", "none") != "none":
        raise AdapterError("it changes biases (bias); train it with bias='none'")
    if stored.get("init_lora_weights") not in _PLAIN_INITS:
        raise AdapterError("it needs a changed base model (init_lora_weights); convert it when saving")
    unknown = sorted(
        name for name, value in stored.items() if value and name not in _WITHOUT_EFFECT | _READ | _REFUSED.keys()
    )
    if unknown:
        raise AdapterError(f"{CONFIG_FILE} sets {unknown[0][:64]}, which is not known here")


def _patterns(stored: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    given = stored.get(field) or {}
    if not isinstance(given, dict) or not all(_PLAIN_NAME.fullmatch(name) for name in given):
        raise AdapterError(f"{field} must be of plain names of modules; patterns are not served")
    return list(given.items())


def _rank(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise AdapterError(f"the rank of {name[:64]} must be 1 to {MAX_RANK}")
    return value


def _alpha(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise AdapterError(f"the strength of {name[:64]} must be a number")
    return float(value)


def _of_pattern(patterns: Mapping[str, Value] | None, name: str, default: Value) -> Value:
    """The value of the first entry that the module's name ends with, as in PEFT; otherwise the default."""
    return next((value for end, value in (patterns or {}).items() if _ends_with(name, end)), default)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")
