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
    "changes, sentence",
    [
        ({"peft_type": "IA3"}, "it is not a LoRA adapter (peft_type); only those are served"),
        ({"use_dora": True}, "it is a DoRA adapter, which normalises the base weights; merge it into the checkpoint"),
        ({"modules_to_save": ["embed_tokens"]},
         "it replaces whole modules (modules_to_save); merge it into the checkpoint"),
        ({"trainable_token_indices": [3]},
         "it changes embeddings (trainable_token_indices); merge it into the checkpoint"),
        ({"bias": "all"}, "it changes biases (bias); train it with bias='none'"),
        ({"lora_bias": True}, "it has biases (lora_bias); train it without"),
        ({"fan_in_fan_out": True},
         "its weights are transposed (fan_in_fan_out); only linear layers of the usual layout are served"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]},
         "it changes parameters outside of linear layers (target_parameters); merge it"),
        ({"layer_replication": [[0, 2]]},
         "it repeats layers of the base model (layer_replication); merge it into a checkpoint"),
        ({"alora_invocation_tokens": [1]},
         "it begins to act in mid-text (alora_invocation_tokens), which is not served"),
        ({"init_lora_weights": "pissa"}, "it needs a changed base model (init_lora_weights); convert it when saving"),
        ({"use_bdlora": {"nblocks": 2}}, "adapter_config.json sets use_bdlora, which is not known here"),
        ({"rank_pattern": {"^q_proj$": 4}}, "rank_pattern must be of plain names of modules; patterns are not served"),
        ({"alpha_pattern": {"(q|k)_proj": 4}},
         "alpha_pattern must be of plain names of modules; patterns are not served"),
        ({"r": 0}, "the rank of r must be 1 to 1024"), ({"r": True}, "the rank of r must be 1 to 1024"),
        ({"r": 100_000}, "the rank of r must be 1 to 1024"),
        ({"lora_alpha": float("nan")}, "the strength of lora_alpha must be a number"),
        ({"lora_alpha": "8"}, "the strength of lora_alpha must be a number"),
        ({"target_modules": None}, "target_modules must be a list of names or a pattern"),
        ({"target_modules": [1]}, "target_modules must be a list of names or a pattern"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AdapterError) as refused:
        parse(**changes)
    assert refused.value.message == sentence


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
