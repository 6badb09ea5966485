"""Every setting of a GGUF file that could change a number is used as llama.cpp uses it, or refused by name."""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from corolla.chassis.errors import CheckpointError
from corolla.models.gguf.architectures import ARCHITECTURES
from corolla.models.gguf.description import configuration, end_token_ids
from corolla.models.gguf.header import GgufHeader, GgufTensor

NUM_TOKENS = 12
ROWS = GgufTensor(Path("tiny.gguf"), (NUM_TOKENS, 64), 0, 0, NUM_TOKENS * 64 * 4)
BASIC = {
    "context_length": 64, "embedding_length": 64, "block_count": 4, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 20000.0,
}  # fmt: skip


def described(
    architecture: str = "llama", tensors: Mapping[str, GgufTensor] | None = None, **settings: Any
) -> dict[str, Any]:
    """The configuration of a file with these settings besides the basic ones; dots of a key are written as `__`."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    facts = {key: value for key, value in {**BASIC, **changed}.items() if value is not None}
    metadata = {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": [str(number) for number in range(NUM_TOKENS)],
        **{f"{architecture}.{key}": value for key, value in facts.items()},
    }
    blocks = {f"blk.{block}.attn_norm.weight": ROWS for block in range(facts.get("block_count", 0))}
    return configuration(GgufHeader(metadata, {"token_embd.weight": ROWS, **blocks, **(tensors or {})}, b""))


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope__scale_linear": 1.0}, None),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
                "rope__scaling__finetuned": True,
                "rope__scaling__yarn_beta_fast": 32.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))},
        ),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_attn_factor": 1.25},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
        ),
    ],
)
def test_positions_are_scaled_as_llama_cpp_scales_them(
    settings: Mapping[str, Any], expected: Mapping[str, Any] | None
) -> None:
    assert described(**settings).get("rope_scaling") == expected


def test_what_a_file_leaves_out_is_what_llama_cpp_takes() -> None:
    left_out = {"attention__head_count_kv": None, "rope__freq_base": None}
    for architecture in ("llama", "qwen2", "qwen3", "gemma2"):
        found = described(architecture, **left_out)
        config = AutoConfig.for_model(**found)
        assert config.num_key_value_heads == 4
        parameters = config.rope_parameters
        assert parameters.get("full_attention", parameters)["rope_theta"] == 10000.0
        assert config.head_dim == 16 if hasattr(config, "head_dim") else True


@pytest.mark.parametrize(
    "architecture, settings, kinds",
    [
        ("gemma2", {"attention__sliding_window": 8}, "sfsf"),
        ("gemma3", {"attention__sliding_window": 8, "attention__sliding_window_pattern": 2}, "sfsf"),
        ("gemma3", {"attention__sliding_window": 8, "attention__sliding_window_pattern": [0, 0, 1, 1]}, "ffss"),
        ("gemma3", {}, "ffff"),
    ],
)
def test_blocks_have_the_windows_that_the_file_says(architecture: str, settings: Mapping[str, Any], kinds: str) -> None:
    names = {"s": "sliding_attention", "f": "full_attention"}
    assert described(architecture, **settings).get("layer_types") == [names[kind] for kind in kinds]


def test_a_setting_that_is_the_same_for_all_blocks_may_be_a_list() -> None:
    found = described(attention__head_count=[4] * 4, attention__head_count_kv=[2] * 4, feed_forward_length=[96] * 4)
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["intermediate_size"]) == (4, 2, 96)


@pytest.mark.parametrize(
    "architecture, settings, sentence",
    [
        ("llama", {"rope__scaling__attn_factor": 0.5},
         "The file sets llama.rope.scaling.attn_factor, by which answers may change, which is not served; give the "
         "model as safetensors."),
        ("llama", {"rope__scaling__alpha": 2.0},
         "The file sets llama.rope.scaling.alpha, by which answers may change, which is not served; give the model "
         "as safetensors."),
        ("llama", {"rope__scaling__type": "longrope"},
         "The file does not say by which factors it scales its rotary embedding, and from which length on; convert "
         "the model again."),
        ("llama", {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_fast": 8.0},
         "The file sets llama.rope.scaling.yarn_beta_fast, by which answers may change, which is not served; give "
         "the model as safetensors."),
        ("llama", {"rope__scaling__factor": -1.0},
         "The file has a llama.rope.scaling.factor that makes no sense; convert the model again."),
        ("llama", {"rope__dimension_count": 8},
         "The file sets llama.rope.dimension_count to 8 where keys have 16 numbers, which is not served; give the "
         "model as safetensors."),
        ("llama", {"attention__value_length": 32},
         "The file sets llama.attention.value_length to 32 where keys have 16 numbers, which is not served; give the "
         "model as safetensors."),
        ("llama", {"attention__scale": 0.1},
         "The file sets llama.attention.scale, by which answers may change, which is not served; give the model as "
         "safetensors."),
        ("llama", {"final_logit_softcapping": 30.0},
         "The file sets llama.final_logit_softcapping, by which answers may change, which is not served; give the "
         "model as safetensors."),
        ("llama", {"logit_scale": 2.0},
         "The file sets llama.logit_scale, by which answers may change, which is not served; give the model as "
         "safetensors."),
        ("qwen2", {"expert_count": 8, "expert_used_count": 2},
         "The file sets qwen2.expert_count, by which answers may change, which is not served; give the model as "
         "safetensors."),
        ("glm4moe", {"expert_count": 8, "expert_gating_func": 1},
         "The file sets glm4moe.expert_gating_func to 1, which is not served; give the model as safetensors."),
        ("deepseek2", {"attention__kv_lora_rank": 8, "rope__dimension_count": 24, "attention__key_length_mla": 24,
         "attention__value_length_mla": 16},
         "The file gives keys 24 numbers, 24 of them rotated, and values 16; convert the model again."),
        ("glm4", {"rope__dimension_count": 24},
         "The file rotates 24 of the 16 numbers of a head; convert the model again."),
        ("llama", {"attention__head_count_kv": 3},
         "The file gives 4 heads 3 heads of keys, each of 16 numbers; convert the model again."),
        ("qwen35", {"ssm__inner_size": 30, "ssm__time_step_rank": 4, "ssm__group_count": 3},
         "The file has 4 heads of values for 3 heads of keys, of 30 numbers together; convert the model again."),
        ("glm4moe", {"nextn_predict_layers": 4},
         "The file does not say the model's num_hidden_layers; convert the model again."),
        ("llama", {"attention__head_count": [4, 4, 2, 4]},
         "The file gives blocks different values of llama.attention.head_count, which is not served; give the model "
         "as safetensors."),
        ("llama", {"attention__sliding_window_pattern": 4},
         "The file sets attention.sliding_window_pattern for a llama, which is not served; give the model as "
         "safetensors."),
        ("qwen2", {"attention__sliding_window": 8},
         "The file sets qwen2.attention.sliding_window, which is not served; give the model as safetensors."),
        ("qwen2", {"attention__key_length": 32},
         "The file has 4 heads of 32 numbers in a qwen2 of the size 64, which is not served; give the model as "
         "safetensors."),
        ("gemma3", {"attn_logit_softcapping": 50.0},
         "The file sets gemma3.attn_logit_softcapping, by which answers may change, which is not served; give the "
         "model as safetensors."),
        ("gemma2", {"rope__freq_base_swa": 5000.0},
         "The file sets gemma2.rope.freq_base_swa, by which answers may change, which is not served; give the model "
         "as safetensors."),
        ("llama", {"vocab_size": 32},
         "The file lists 12 tokens, has 12 rows of embeddings and a vocabulary of 32; convert the model again."),
        ("llama", {"attention__layer_norm_rms_epsilon": None},
         "The file does not say the model's rms_norm_eps; convert the model again."),
        ("llama", {"a_key_of_tomorrow": 1},
         "The file sets llama.a_key_of_tomorrow, by which answers may change, which is not served; give the model as "
         "safetensors."),
        ("clip", {},
         "The file holds what turns images or sounds into inputs of a model (mmproj), and no model; give the file of "
         "the language model, which lies next to it."),
        ("bailingmoe", {},
         "GGUF files of the architecture 'bailingmoe' are not served; give the model as safetensors, or one of "
         "these: ARCHITECTURES."),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_served_is_named(architecture: str, settings: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        described(architecture, **settings)
    assert refused.value.message.replace(", ".join(ARCHITECTURES), "ARCHITECTURES") == sentence
    assert "fetch" not in sentence, "no file that is fetched again would be served"


@pytest.mark.parametrize(
    "factors, sentence",
    [
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0],
         "The file scales its rotary embedding in rope_freqs.weight otherwise than Llama 3.1 does, which is not "
         "served; give the model as safetensors."),
        ([1.0] * 7 + [math.nan],
         "The file scales its rotary embedding by numbers that make no sense; convert the model again."),
        ([1.0, 2.0], "The file has 2 factors of a rotary embedding of 16 numbers; convert the model again."),
    ],
)  # fmt: skip
def test_factors_of_no_known_rotary_embedding_are_refused(tmp_path: Path, factors: list[float], sentence: str) -> None:
    (tmp_path / "factors").write_bytes(struct.pack(f"<{len(factors)}f", *factors))
    tensor = GgufTensor(tmp_path / "factors", (len(factors),), 0, 0, 4 * len(factors))
    with pytest.raises(CheckpointError) as refused:
        described(tensors={"rope_freqs.weight": tensor})
    assert refused.value.message == sentence


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_settings_without_effect_are_no_reason_to_refuse(architecture: str) -> None:
    plain = described(architecture)
    neutral: dict[str, Any] = {
        "tensor_data_layout": "Meta AI original pth", "expert_count": 0, "expert_used_count": 0,
        "expert_shared_count": 0, "expert_group_count": 1, "expert_weights_scale": 1.0, "nextn_predict_layers": 0,
        "attention__causal": True, "attention__scale": 0.0, "attention__clamp_kqv": 0.0,
        "attention__max_alibi_bias": 0.0, "attention__shared_kv_layers": 0, "attention__sliding_window": 0,
        "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "logit_scale": 1.0, "residual_scale": 1.0,
        "embedding_scale": 1.0, "pooling_type": 0, "rope__scaling__yarn_log_multiplier": 0.0,
    }  # fmt: skip
    assert described(architecture, **neutral) == plain


def test_fewer_tokens_than_rows_of_embeddings_are_refused() -> None:
    rows = GgufTensor(Path("tiny.gguf"), (NUM_TOKENS + 4, 64), 0, 0, 1)
    with pytest.raises(CheckpointError, match="lists 12 tokens, has 16 rows of embeddings"):
        described(tensors={"token_embd.weight": rows})


def test_an_answer_ends_where_llama_cpp_ends_it() -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["a", "</s>", "<|im_end|>", "<|eot_id|>", "b"],
        "tokenizer.ggml.token_type": [1, 3, 4, 1, 1],
        "tokenizer.ggml.eos_token_id": 4,
    }
    assert end_token_ids(metadata) == [4, 1, 2, 3]
    assert end_token_ids({**metadata, "tokenizer.ggml.eos_token_id": 2**32 - 1}) == [1, 2, 3]
