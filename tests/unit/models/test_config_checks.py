"""Numbers of a configuration that cannot be, or do not fit each other, are refused word for word."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from corolla.chassis.errors import CheckpointError
from corolla.models.config_checks import check_factors, check_ranges, check_sizes
from tests.checkpoints import tiny_config

SHAPE = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def size_refusal(family: str, settings: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as refused:
        check_sizes(Path("config.json"), settings, CONFIG_MAPPING[family])
    return refused.value.message


@pytest.mark.parametrize(
    "family, changes, sentence",
    [
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads to 4, which is no multiple of num_key_value_heads, 3",
        ),
        (
            "llama",
            {"num_key_value_heads": 8},
            "num_attention_heads to 4, which is no multiple of num_key_value_heads, 8",
        ),
        (
            "mistral",
            {"num_attention_heads": 12, "hidden_size": 96, "num_key_value_heads": None, "head_dim": 8},
            None,
        ),
        ("llama", {"hidden_size": 66}, "hidden_size to 66, which is no multiple of num_attention_heads, 4"),
        ("gpt2", {"n_embd": 66, "n_head": 4}, "n_embd to 66, which is no multiple of n_head, 4"),
        ("llama", {"hidden_size": 66, "head_dim": 16}, None),
        ("qwen3", {"hidden_size": 66}, None),
        ("deepseek_v3", {"hidden_size": 66, "num_key_value_heads": 4}, None),
        (
            "qwen3_next",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 4},
            "linear_num_value_heads to 4, which is no multiple of linear_num_key_heads, 3",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 4, "topk_group": 1},
            "n_routed_experts to 6, which is no multiple of n_group, 4",
        ),
        (
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok to 5, which is more than num_local_experts, 4",
        ),
        ("jamba", {"num_experts": 1, "num_experts_per_tok": 2}, None),
        ("longcat_flash", {"num_key_value_heads": 4, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 6}, None),
        (
            "longcat_flash",
            {"num_key_value_heads": 4, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 7},
            "moe_topk to 7, which is more than n_routed_experts and zero_expert_num, 6",
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 3},
            "topk_group to 3, which is more than n_group, 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other(family: str, changes: dict[str, Any], sentence: str | None) -> None:
    settings = changes if family == "gpt2" else {**SHAPE, **changes}
    if sentence is None:
        check_sizes(Path("config.json"), settings, CONFIG_MAPPING[family])
    else:
        assert size_refusal(family, settings) == f"config.json sets {sentence}; correct it."


@pytest.mark.parametrize("entries", [3, 5])
def test_lists_of_another_length_than_there_are_blocks(entries: int) -> None:
    said = size_refusal("olmo3", {**SHAPE, "layer_types": ["full_attention"] * entries})
    assert said == f"config.json sets num_hidden_layers to 4, and layer_types has {entries} entries; correct it."


@pytest.mark.parametrize(
    "name, number, sentence",
    [
        ("n_layer", 4097, "n_layer to 4097, where 1 to 4096"),
        ("num_layers", 1e300, "num_layers to 1e+300, where 1 to 4096"),
        ("num_hidden_layers", 0, "num_hidden_layers to 0, where 1 to 4096"),
        ("vocab_size", -1, "vocab_size to -1, where 1 to 16777216"),
        ("num_attention_heads", 0, "num_attention_heads to 0, where 1 to 65536"),
        ("hidden_size", -64, "hidden_size to -64, where 1 to 1048576"),
        ("n_embd", -64, "n_embd to -64, where 1 to 1048576"),
        ("head_dim", 0, "head_dim to 0, where 1 to 1048576"),
        ("intermediate_size", -1, "intermediate_size to -1, where 0 to 16777216"),
        ("sliding_window", 0, "sliding_window to 0, where 1 to 1099511627776"),
    ],
)
def test_numbers_that_no_model_has(name: str, number: float, sentence: str) -> None:
    for stored in ({name: number}, {"text_config": {name: number}}):
        with pytest.raises(CheckpointError) as refused:
            check_ranges(Path("config.json"), stored)
        assert refused.value.message == f"config.json sets {sentence} can be served; correct it."


def test_a_window_that_is_not_used_may_be_0() -> None:
    check_ranges(Path("config.json"), {"sliding_window": 0, "use_sliding_window": False})


def test_factors_of_other_families() -> None:
    with pytest.raises(CheckpointError) as refused:
        check_factors(Path("config.json"), tiny_config("llama", logit_scale=0.5))
    assert refused.value.message == (
        "config.json sets logit_scale, with which a llama model is not computed; correct model_type, or remove that "
        "field."
    )
