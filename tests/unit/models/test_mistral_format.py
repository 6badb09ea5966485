"""Settings of Mistral's own format that would change answers, and are not known, are refused by name."""

from typing import Any

import pytest

from corolla.chassis.errors import CheckpointError, UnsupportedFamily
from corolla.models.mistral_format import settings_of

PARAMS = {
    "dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5,
    "vocab_size": 320,
}  # fmt: skip
YARN = {"factor": 8.0, "alpha": 1, "beta": 32, "apply_scale": False, "original_max_position_embeddings": 64}
SCALING = {"beta": 0.1, "original_max_position_embeddings": 64}
LATENTS = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"kv_lora_rank": 8},
         "Models of params.json are not supported: latents without experts in Mistral's own format; give the model "
         "in transformers' format."),
        ({"moe": {"num_experts": 4}},
         "Models of params.json are not supported: experts without latents in Mistral's own format; give the model "
         "in transformers' format."),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}},
         "Models of params.json are not supported: quantised weights of a dense model in Mistral's own format; give "
         "the model in transformers' format."),
        ({"setting_of_tomorrow": 1},
         "params.json sets setting_of_tomorrow, which is not known here; give the model in transformers' format."),
        ({"activation": "gelu"},
         "params.json sets activation, which is not known here; give the model in transformers' format."),
        ({"yarn": {"factor": 8.0}}, "params.json sets a yarn that scales attention, or more, which is not known here."),
        ({"yarn": {**YARN, "apply_scale": True}},
         "params.json sets a yarn that scales attention, or more, which is not known here."),
        ({"llama_4_scaling": SCALING}, "params.json sets llama_4_scaling without yarn, which is not known here."),
        ({"yarn": YARN, "llama_4_scaling": {"beta": 0.1}},
         "params.json sets another llama_4_scaling than is known here."),
        ({"kv_lora_rank": 8, "moe": {"num_experts": 4}},
         "params.json does not set all of q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, "
         "moe and llama_4_scaling."),
        ({**LATENTS, "moe": {"num_experts": 4, "router": "new"}, "yarn": YARN, "llama_4_scaling": SCALING},
         "params.json sets router, which is not known here; give the model in transformers' format."),
        ({**LATENTS, "moe": {"num_experts": 4}, "quantization": {"qformat_weight": "nvfp4"}},
         "params.json sets a quantization that is not known here; give the model in transformers' format."),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_known_is_named(changes: dict[str, Any], sentence: str) -> None:
    settings_of(PARAMS)
    with pytest.raises((CheckpointError, UnsupportedFamily)) as refused:
        settings_of({**PARAMS, **changes})
    assert refused.value.message == sentence
