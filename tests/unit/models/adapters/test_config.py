"""Which adapters are served, and how strongly they act."""

import json
import math
from typing import Any

import pytest

from corolla.chassis.errors import AdapterError
from corolla.models.adapters.config import MAX_CONFIG_BYTES, AdapterConfig

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "mlp.up_proj"]}


def parse(**changes: Any) -> AdapterConfig:
    return AdapterConfig.parse(json.dumps({**PLAIN, **changes}).encode())


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"peft_type": "IA3"}, "not a LoRA"), ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"), ({"trainable_token_indices": [3]}, "embeddings"),
        ({"bias": "all"}, "biases"), ({"lora_bias": True}, "biases"), ({"fan_in_fan_out": True}, "transposed"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 2]]}, "repeats layers"), ({"alora_invocation_tokens": [1]}, "mid-text"),
        ({"init_lora_weights": "pissa"}, "changed base model"), ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"rank_pattern": {"^q_proj$": 4}}, "plain names"), ({"alpha_pattern": {"(q|k)_proj": 4}}, "plain names"),
        ({"r": 0}, "rank"), ({"r": True}, "rank"), ({"r": 100_000}, "rank"), ({"lora_alpha": float("nan")}, "strength"),
        ({"lora_alpha": "8"}, "strength"), ({"target_modules": None}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        parse(**changes)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b" " * (MAX_CONFIG_BYTES + 1)])
def test_what_is_no_configuration_is_refused(text: bytes) -> None:
    with pytest.raises(AdapterError):
        AdapterConfig.parse(text)


def test_what_is_about_training_changes_nothing() -> None:
    changes = {"lora_dropout": 0.1, "inference_mode": True, "init_lora_weights": "gaussian", "layers_to_transform": [1]}
    assert parse(**changes) == parse()


def test_strength_is_divided_by_the_rank_or_by_its_root() -> None:
    assert parse().scaling_of("model.layers.0.self_attn.q_proj") == 2.0
    assert parse(use_rslora=True).scaling_of("model.layers.0.self_attn.q_proj") == 16 / math.sqrt(8)


def test_a_module_may_have_a_rank_and_a_strength_of_its_own() -> None:
    config = parse(rank_pattern={"layers.1.self_attn.q_proj": 2}, alpha_pattern={"up_proj": 4})
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.11.self_attn.q_proj") == 8
    assert config.scaling_of("model.layers.1.self_attn.q_proj") == 8.0
    assert config.scaling_of("model.layers.1.mlp.up_proj") == 0.5
    assert config.scaling_of("model.layers.1.mlp.cup_proj") == 2.0


def test_targets_are_ends_of_names() -> None:
    assert parse().targets_module("model.layers.0.mlp.up_proj")
    assert not parse().targets_module("model.layers.0.other.up_proj")
    assert parse(target_modules="all-linear").targets_module("model.layers.0.other.up_proj")
