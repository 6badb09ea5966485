"""Every family that the table calls fused has blocks that fuse, and kernels for each of their parts."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from corolla.compute.triton_blocks import why_no_kernel
from corolla.models.checkpoint import Checkpoint
from corolla.models.families import FAMILIES
from corolla.models.fused import RmsNorm
from corolla.models.span_model import SpanModel, empty_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.tiers import quick

SPAN = Span(0, 3)
FUSED = sorted(name for name, family in FAMILIES.items() if family.fused)


def model_of(family: str, folder: Path, **changes: object) -> SpanModel:
    made = make_tiny_checkpoint(family, folder / family, num_blocks=len(SPAN), config_changes=changes)
    return SpanModel(empty_span(Checkpoint.from_pretrained(str(made)), SPAN), SPAN, FAMILIES[family])


@pytest.mark.parametrize("family", quick(FUSED, "cohere", "gemma3_text"))
def test_blocks_of_fused_families_have_kernels(family: str, tmp_path: Path) -> None:
    # Projections that are cut at a bound run by the family's own code.
    model = model_of(family, tmp_path, **({"clip_qkv": None} if family == "olmoe" else {}))
    model.make_fused("library")
    assert model.fused is not None
    assert [why_no_kernel(layer, torch.float32) for layer in model.fused.layers] == [None] * len(SPAN)


def test_a_norm_may_have_wider_weights_than_hidden_states() -> None:
    module = GptOssRMSNorm(8).requires_grad_(False)
    module.weight.copy_(torch.linspace(0.5, 1.5, 8))
    hidden = torch.randn(3, 8).half()
    assert torch.equal(RmsNorm(module)(hidden), module(hidden))
    assert RmsNorm(module)(hidden).dtype == torch.float16


def test_an_attention_with_another_part_is_not_fused(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    cast(Any, model.layers[1]).self_attn.scale = nn.Identity()
    model.make_fused("library")
    assert model.fused is None


@pytest.mark.parametrize(
    "family, changes, rotates",
    [
        ("exaone4", {}, [True, False, False]),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, [True] * 3),
        ("cohere2", {}, [True, False, False]),
        ("cohere2", {"layer_types": ["full_attention"] * 3}, [False] * 3),
        ("smollm3", {}, [True, False, True]),
    ],
)
def test_layers_without_a_window_may_not_rotate(
    family: str, changes: dict[str, object], rotates: list[bool], tmp_path: Path
) -> None:
    model = model_of(family, tmp_path, **changes)
    model.make_fused("library")
    assert model.fused is not None
    assert [layer.rotary is not None for layer in model.fused.layers] == rotates


def test_each_kind_of_layer_has_its_own_table(tmp_path: Path) -> None:
    model = model_of("gemma3_text", tmp_path)
    model.make_fused("library")
    assert model.fused is not None
    first, second, third = (layer.rotary for layer in model.fused.layers)
    assert first is not second
    assert second is third
    assert model.fused.rotaries == (first, second)
