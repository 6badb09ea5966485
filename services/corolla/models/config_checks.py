"""Refuses numbers of a configuration that no model has, or that do not fit each other, by their names. Pure.

The family's code would fail with such numbers, far from the file that has them, or take all memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from corolla.chassis.errors import CheckpointError
from corolla.models.families import EXPERTS_PER_TOKEN

# The least and the largest number that can be served, under each name that families give it.
_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 1 << 12)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), (1, 1 << 16)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (0, 1 << 24)),
    "vocab_size": (1, 1 << 24),
    "sliding_window": (1, 1 << 40),
}
# The first number of a row is a multiple of the second, unless the configuration has one of the others.
_MULTIPLES: Final[tuple[tuple[str, ...], ...]] = (
    ("num_attention_heads", "num_key_value_heads"),
    ("hidden_size", "num_attention_heads", "head_dim", "attention_head_dim", "kv_channels", "qk_nope_head_dim"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("n_routed_experts", "n_group"),
)
# The first of these that the configuration has is at most the first of those.
_PARTS: Final = (
    (EXPERTS_PER_TOKEN, ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")),
    (("topk_group",), ("n_group",)),
)
# Some families scale or cap hidden states, scores or logits by these fields.
_FACTORS: Final = (
    "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier", "final_logit_softcapping",
    "lm_head_multiplier", "logit_scale", "logits_scaling", "query_pre_attn_scalar", "residual_multiplier",
)  # fmt: skip


def check_ranges(path: Path, stored: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the content of the file `path`, or a table in it, has a number out of its range."""
    for table in (stored, *(each for each in stored.values() if isinstance(each, Mapping))):
        for name, (least, most) in _RANGES.items():
            number = table.get(name)
            is_unused = name == "sliding_window" and table.get("use_sliding_window") is False
            if isinstance(number, int | float) and not least <= number <= most and not is_unused:
                raise CheckpointError(
                    f"{path} sets {name} to {str(number)[:40]}, where {least} to {most} can be served; correct it."
                )


def check_sizes(path: Path, stored: Mapping[str, Any], config_class: type[PretrainedConfig]) -> None:
    """Refuses sizes that do not fit each other.

    Args:
        stored: the settings of the language model in the file `path`.
        config_class: the class of the family's configurations, with other names of sizes, and sizes of models whose
            settings do not say any.

    Raises:
        CheckpointError: a number does not fit another one.
    """

    def read(*names: str) -> tuple[str, int]:
        """The first of these numbers that is set, with its name in the file; 0: none is."""
        for name in names:
            own = name if name in stored else str(config_class.attribute_map.get(name, name))
            value = stored[own] if own in stored else getattr(config_class, own, None)
            if type(value) is int and value:
                return own, value
        return "", 0

    for first, second, *others in _MULTIPLES:
        (name, number), (of_name, of) = read(first), read(second)
        if number and of and number % of and not read(*others)[1]:
            raise CheckpointError(
                f"{path} sets {name} to {number}, which is no multiple of {of_name}, {of}; correct it."
            )
    for parts, wholes in _PARTS:
        (name, number), (of_name, of) = read(*parts), read(*wholes)
        if of_name == "n_routed_experts" and (more := read("zero_expert_num")[1]):
            of_name, of = "n_routed_experts and zero_expert_num", of + more
        # One expert is a dense block, whose files may say that a token gets several.
        if number > of > 1:
            raise CheckpointError(f"{path} sets {name} to {number}, which is more than {of_name}, {of}; correct it.")
    (name, number), kinds = read("num_hidden_layers"), stored.get("layer_types")
    if number and isinstance(kinds, list) and len(kinds) != number:
        raise CheckpointError(f"{path} sets {name} to {number}, and layer_types has {len(kinds)} entries; correct it.")


def check_factors(path: Path, config: PretrainedConfig) -> None:
    """Refuses factors of other families: transformers keeps them in a configuration, and computes without them.

    Raises:
        CheckpointError: the file `path` sets one.
    """
    known = type(config)()
    odd = [
        name
        for name in _FACTORS
        # A factor of 1 changes nothing, and neither does a cap or a bound of 0.
        if getattr(config, name, None) not in (None, 1.0, 0.0) and not hasattr(known, name)
    ]
    if odd:
        raise CheckpointError(
            f"{path} sets {odd[0]}, with which a {config.model_type} model is not computed; correct model_type, or "
            "remove that field."
        )
