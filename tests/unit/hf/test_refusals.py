"""`generate` refuses options that remote blocks do not support, by name and before any step."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from corolla.hf.refusals import refuse_alone, refuse_in_session, refuse_unsupported

OPTIONS: dict[str, Any] = {
    "cache_implementation": "static", "cache_config": {"nbits": 4}, "output_attentions": True,
    "output_hidden_states": True, "assistant_early_exit": 2, "use_mtp": True, "speculation_type": "dflash",
    "low_memory": True, "constraints": [object()], "force_words_ids": [[1]], "dola_layers": "high",
    "num_beam_groups": 2, "penalty_alpha": 0.6,
}  # fmt: skip

ARGUMENTS: dict[str, Any] = {
    "synced_gpus": True,
    "trust_remote_code": True,
    "encoder_outputs": (torch.zeros(1),),
    "decoder_input_ids": torch.zeros(1, 1),
    "custom_generate": "somebody/something",
    "past_key_values": DynamicCache([(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))]),
    "attention_mask": torch.tensor([[1, 1, 0]]),
}


def config_with(**options: Any) -> GenerationConfig:
    config = GenerationConfig()
    config.top_k = 4
    for name, value in options.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        refuse_unsupported({}, config_with(**{name: OPTIONS[name]}))


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        refuse_unsupported({name: ARGUMENTS[name]}, config_with())


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 3, 3), {"full_attention": None}, [[1, 1, 1]]])
def test_a_mask_for_each_query_is_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match="`attention_mask`"):
        refuse_unsupported({"attention_mask": mask}, config_with())


@pytest.mark.parametrize("name", ["inputs", "input_ids", "inputs_embeds"])
def test_a_mask_of_another_size_is_refused(name: str) -> None:
    given = torch.zeros(2, 5, *([8] if name == "inputs_embeds" else []))
    for shape in ((2, 4), (2, 6), (1, 5)):
        with pytest.raises(ValueError, match=r"`attention_mask` must have the shape \[2, 5\]"):
            refuse_alone({name: given, "attention_mask": torch.ones(shape)})
    refuse_alone({name: given, "attention_mask": torch.ones(2, 5)})
    refuse_alone({name: given, "attention_mask": torch.ones(2, 9), "past_key_values": object()})


def test_options_at_their_defaults_are_not_refused() -> None:
    refuse_unsupported(dict.fromkeys(ARGUMENTS), config_with(**dict.fromkeys(OPTIONS)))
    refuse_unsupported({"synced_gpus": False}, config_with(output_attentions=False, cache_implementation="dynamic"))


@pytest.mark.parametrize(
    "arguments, options, has_text",
    [
        ({"past_key_values": object()}, {}, False),
        ({}, {"use_cache": False}, False),
        ({}, {"token_healing": True}, False),
        ({"inputs_embeds": torch.zeros(1, 2, 3)}, {}, True),
        ({"inputs_embeds": torch.zeros(1, 2, 3), "inputs": torch.zeros(1, 2)}, {}, False),
    ],
)
def test_arguments_that_contradict_a_session_are_refused(
    arguments: dict[str, Any], options: dict[str, Any], has_text: bool
) -> None:
    name = next(iter({**options, **arguments}))
    with pytest.raises(ValueError, match=f"`{name}"):
        refuse_in_session(arguments, config_with(**options), has_text=has_text)
