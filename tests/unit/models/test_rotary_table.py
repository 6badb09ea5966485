"""The rotary table agrees with the family's own module."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.configuration_olmo3 import Olmo3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from corolla.models.rotary_table import RotaryTable

LIKE = torch.zeros(1, 32)
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 1e4,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}  # fmt: skip


def table_and_module(kind: str) -> tuple[RotaryTable, LlamaRotaryEmbedding]:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=2, max_position_embeddings=128, rope_parameters=SCALINGS[kind]
    )
    return RotaryTable(LlamaRotaryEmbedding(config), config), LlamaRotaryEmbedding(config)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = states.shape[-1] // 2
    return states * cos + torch.cat((-states[..., half:], states[..., :half]), dim=-1) * sin


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_rotary_table_rotates_like_the_families_own_module(kind: str) -> None:
    table, module = table_and_module(kind)
    for positions in ([0], [5, 6, 7], [0, 1023, 1024], [3000], [2, 90]):
        position_ids = torch.tensor(positions)
        cos, sin, _ = table.turn(position_ids, max(positions) + 1, LIKE)
        assert cos.shape == sin.shape == (len(positions), 1, 16)
        states = torch.randn(len(positions), 3, 16)
        wanted_cos, wanted_sin = (part[0].unsqueeze(1) for part in module(LIKE, position_ids.unsqueeze(0)))
        wanted = rotated(states, wanted_cos, wanted_sin)
        torch.testing.assert_close(states * cos + states.roll(8, -1) * sin, wanted, rtol=0, atol=0)


def test_only_tables_that_do_not_depend_on_the_length_are_kept() -> None:
    assert len(table_and_module("llama3")[0].__dict__["_table"]) == 0
    kept, not_kept = table_and_module("llama3")[0], table_and_module("dynamic")[0]
    for table in (kept, not_kept):
        table.turn(torch.tensor([40]), 41, LIKE)
    assert len(kept.__dict__["_table"]) == 1024
    assert len(not_kept.__dict__["_table"]) == 0


def test_each_kind_of_layers_has_a_table_of_its_own() -> None:
    """Half precision, too: this family rotates by numbers in float32."""
    parameters = {"sliding_attention": SCALINGS["default"], "full_attention": {**SCALINGS["linear"], "rope_theta": 1e6}}
    config = Olmo3Config(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=2, rope_parameters=parameters,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    module, position_ids, like = Olmo3RotaryEmbedding(config), torch.tensor([3, 70]), LIKE.bfloat16()
    for kind in parameters:
        cos, sin, _ = RotaryTable(module, config, kind=kind).turn(position_ids, 71, like)
        wanted_cos, wanted_sin = module(like, position_ids.unsqueeze(0), kind)
        assert torch.equal(cos[:, 0], wanted_cos[0])
        assert torch.equal(sin[:, 0, 8:], wanted_sin[0, :, 8:])
        assert cos.dtype == torch.float32
