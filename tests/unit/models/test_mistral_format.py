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
        ({"kv_lora_rank": 8}, r"latents without experts in Mistral's own format; give the model in transformers'"),
        ({"moe": {"num_experts": 4}}, r"experts without latents in Mistral's own format; give"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, r"quantised weights of a dense model in Mistral's own"),
        ({"setting_of_tomorrow": 1}, r"sets setting_of_tomorrow, which is not known here; give the model in"),
        ({"activation": "gelu"}, r"sets activation, which is not known here"),
        ({"yarn": {"factor": 8.0}}, r"sets a yarn that scales attention, or more, which is not known here"),
        ({"yarn": {**YARN, "apply_scale": True}}, r"sets a yarn that scales attention"),
        ({"llama_4_scaling": SCALING}, r"sets llama_4_scaling without yarn, which is not known here"),
        ({"yarn": YARN, "llama_4_scaling": {"beta": 0.1}}, r"sets another llama_4_scaling than is known here"),
        ({"kv_lora_rank": 8, "moe": {"num_experts": 4}}, r"does not set all of q_lora_rank, .*, moe and llama_4"),
        (
            {**LATENTS, "moe": {"num_experts": 4, "router": "new"}, "yarn": YARN, "llama_4_scaling": SCALING},
            r"sets router, which is not known here",
        ),
        (
            {**LATENTS, "moe": {"num_experts": 4}, "quantization": {"qformat_weight": "nvfp4"}},
            r"sets a quantization that is not known here; give",
        ),
    ],
)
def test_a_setting_that_is_not_known_is_named(changes: dict[str, Any], sentence: str) -> None:
    settings_of(PARAMS)
    with pytest.raises((CheckpointError, UnsupportedFamily), match=rf"params\.json.*{sentence}"):
        settings_of({**PARAMS, **changes})
