"""The one rule that finds a language model in a larger one."""

from typing import Any

import pytest

from corolla.chassis.errors import CheckpointError
from corolla.models.wrappers import TextModel, joined_rows, other_part, split_names, text_name, text_names


@pytest.mark.parametrize(
    "stored, name",
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("thinker.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("thinker.lm_head.weight", "lm_head.weight"),
    ],
)
def test_prefixes_of_wrappers_are_taken_off(stored: str, name: str) -> None:
    assert text_name(stored) == name


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"two tensors for model\.norm\.weight: model\.norm\.weight and thinker"):
        text_names(["model.norm.weight", "thinker.model.norm.weight"])


def test_rows_of_one_tensor_are_queries_keys_and_values() -> None:
    stored = "model.layers.3.attention.query_key_value.weight"
    names = split_names([stored, "model.layers.3.mlp.gate.expert_bias"])
    assert names.pop("model.layers.3.mlp.gate.e_score_correction_bias") == "model.layers.3.mlp.gate.expert_bias"
    rows = {name.split(".")[4]: joined_rows(name, each, 4, 2, 16) for name, each in names.items()}
    assert rows == {"q_proj": (0, 64), "k_proj": (64, 96), "v_proj": (96, 128)}
    assert joined_rows("lm_head.weight", "lm_head.weight", 4, 2, 16) is None


def test_a_router_that_the_familys_code_does_not_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match="served only with score_function=sigmoid"):
        TextModel({"model_type": "bailing_moe_v2", "score_function": "softmax"}).family_settings()


@pytest.mark.parametrize(
    "outer, inner, is_untied",
    [(None, None, False), (None, False, True), (False, None, True), (False, False, True), (True, False, False)],
)
def test_a_head_is_untied_where_one_table_says_so_and_none_denies_it(
    outer: bool | None, inner: bool | None, is_untied: bool
) -> None:
    text = {"model_type": "qwen3_vl_text", "tie_word_embeddings": inner}
    assert TextModel.of({"tie_word_embeddings": outer, "text_config": text}).is_untied is is_untied


def test_parts_that_see_or_hear_are_known() -> None:
    assert other_part("model.visual.blocks.0.attn.qkv.weight") == "visual"
    assert other_part("thinker.audio_tower.conv1.weight") == "audio_tower"
    assert other_part("model.layers.0.visual_gate.weight") is None
    assert other_part("model.language_model.layers.0.mlp.up_proj.weight") is None


@pytest.mark.parametrize(
    "stored, expected",
    [
        ({"model_type": "llama", "text_config": {"model_type": "qwen3"}}, {"model_type": "llama"}),
        (
            {"model_type": "qwen3_5", "eos_token_id": 7, "quantization_config": {"a": 1}, "text_config": {"a": 2}},
            {"model_type": "qwen3_5_text", "eos_token_id": 7, "quantization_config": {"a": 1}, "a": 2},
        ),
        (
            {"model_type": "mistral3", "eos_token_id": 7, "text_config": {"eos_token_id": [1, 2]}},
            {"model_type": "mistral", "eos_token_id": [1, 2]},
        ),
        ({"model_type": "own", "thinker_config": {"text_config": {"model_type": "qwen3"}}}, {"model_type": "qwen3"}),
        ({"model_type": "own", "llm_config": {"hidden_size": 4}}, {"model_type": "own", "hidden_size": 4}),
    ],
)
def test_settings_of_the_language_model_come_with_those_that_hold_for_all(
    stored: dict[str, Any], expected: dict[str, Any]
) -> None:
    text = TextModel.of(stored)
    assert text.is_wrapped == (text.settings is not stored)
    assert {name: text.settings[name] for name in expected} == expected
