"""Experts in panels give the numbers of transformers' own, whatever tokens run beside a token."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from corolla.models.packed.modules import PackedExperts, lay_out_experts

HIDDEN, GATED, NUM_EXPERTS, NUM_CHOSEN, NUM_TOKENS = 64, 96, 12, 3, 70
# The dtype, the activation, and the tolerance.
KINDS = [(torch.float32, "silu", 1e-5), (torch.bfloat16, "silu", 2e-2), (torch.float32, "gelu", 1e-5)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype, activation, tolerance", KINDS)
@torch.inference_mode()
def test_experts_are_those_of_transformers_and_no_token_depends_on_the_others(
    dtype: torch.dtype, activation: str, tolerance: float
) -> None:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=GATED, num_local_experts=NUM_EXPERTS, hidden_act=activation
    )
    own = MixtralExperts(config).to(dtype)
    for parameter in own.parameters():
        parameter.copy_(draw(*parameter.shape) / 8)
    hidden, logits = draw(NUM_TOKENS, HIDDEN).to(dtype), draw(NUM_TOKENS, NUM_EXPERTS)
    logits[:, 5] = -100  # an expert without a token
    weights, ids = logits.softmax(-1).topk(NUM_CHOSEN)
    expected = own(hidden, ids, weights)
    root = nn.ModuleDict({"experts": own})
    lay_out_experts(root, "panels")
    experts = root["experts"]
    assert isinstance(experts, PackedExperts)
    assert (experts.compiled_panels(dtype) is not None) is (activation == "silu")
    torch.set_num_threads(1)
    found = experts(hidden, ids, weights)
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance
    torch.set_num_threads(2)
    assert torch.equal(experts(hidden, ids, weights), found)
    for start, end in ((0, 1), (3, 9), (41, NUM_TOKENS)):
        assert torch.equal(experts(hidden[start:end], ids[start:end], weights[start:end]), found[start:end])
    hidden[7, 3] = torch.nan
    spoilt = experts(hidden, ids, weights)
    assert spoilt[7].isnan().all()
    assert torch.equal(spoilt[8:], found[8:])
