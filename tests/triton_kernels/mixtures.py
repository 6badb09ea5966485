"""Mixtures of experts by Triton kernels against the families' own code, and each token in several calls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from corolla.compute.triton_blocks import MixturePlan
from corolla.kernels.expert_routing import Routing
from corolla.kernels.layouts import LAYOUTS
from corolla.kernels.triton import expert_launches, launches
from corolla.kernels.triton.expert_launches import (
    ChosenExperts,
    add_experts,
    choose_experts,
    multiply_experts,
    multiply_packed_experts,
)
from corolla.kernels.triton.launches import multiply
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.fused import MixtureMlp
from corolla.models.invariant import InvariantProduct, triton_product
from corolla.models.mixtures import Mixture, failed_mixture_trial
from corolla.models.packed.modules import PackedExpertWeights
from corolla.models.packed.trial import choose_packed_products
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.tiers import quick
from tests.triton_kernels import DEVICE
from tests.triton_kernels.ordered_products import install
from tests.triton_kernels.recorded_launches import record

# The interpreter cuts bfloat16 where a GPU rounds it.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 6e-3, torch.bfloat16: 6e-2}
# Their features: float32 weights; a gated shared expert; norms over the chosen; the softmax of the chosen; groups;
# biases, and gates beside their ups; a linear layer within the router; shares among near scores.
FAMILIES = [
    "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "solar_open",
    "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "phimoe",
]  # fmt: skip
# More experts than a token gets groups of, so that groups, ties and a correction decide something.
CHANGES: dict[str, dict[str, Any]] = {
    "solar_open": {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3},
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True},
}


@pytest.fixture(autouse=True, scope="module")
def one_order() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCES[found.dtype]


def mixture_of(folder: Path, family: str) -> tuple[MixtureMlp, Mixture]:
    """The mixture of a family's last block, and its description. Its correction of scores is not zero."""
    made = make_tiny_checkpoint(family, folder, num_blocks=3, config_changes=CHANGES.get(family, {}))
    model = load_span(Checkpoint.from_pretrained(str(made)), Span(2, 3), dtype=torch.float32, device=DEVICE)
    model.make_fused("library")
    assert model.fused is not None
    mlp = model.fused.layers[0].mlp
    assert isinstance(mlp, MixtureMlp)
    assert mlp.mixture is not None
    for linear in model.linears:
        linear.invariant = InvariantProduct("triton", triton_product, (1,))
    if mlp.mixture.correction is not None:
        mlp.mixture.correction.copy_(draw(mlp.mixture.routing.num_experts) * 0.1)
    for bias in (mlp.mixture.router_bias, mlp.mixture.gate_up_bias, mlp.mixture.down_bias):
        if bias is not None:
            bias.requires_grad_(False).copy_(draw(*bias.shape))
    return mlp, mlp.mixture


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen2_moe", "solar_open"))
def test_a_mixture_is_that_of_the_family_and_no_token_depends_on_the_others(tmp_path: Path, family: str) -> None:
    mlp, mixture = mixture_of(tmp_path, family)
    plan = MixturePlan(mixture)
    normed = draw(19, mixture.gate_up.shape[-1]) * 5
    whole = plan.forward(normed, 0, None)
    assert_near(whole, mlp.forward(normed, 0, None))
    for start, end in ((0, 1), (3, 9), (18, 19)):
        assert torch.equal(plan.forward(normed[start:end], 0, None), whole[start:end])


@pytest.mark.full
@torch.inference_mode()
def test_a_recorded_step_chooses_other_experts_for_other_tokens(tmp_path: Path) -> None:
    _, mixture = mixture_of(tmp_path, "qwen3_moe")
    plan = MixturePlan(mixture)
    rows = draw(8, mixture.gate_up.shape[-1]) * 5
    held, out = rows[:4].clone(), torch.empty_like(rows[:4])

    def step() -> None:
        out.copy_(plan.forward(held, 0, None))

    replay = (record if DEVICE == "cpu" else CudaCapture(torch.device(DEVICE)))(step, step)
    for start in (4, 0, 2):
        held.copy_(rows[start : start + 4])
        replay()
        assert torch.equal(out, plan.forward(rows[start : start + 4], 0, None))


def test_weights_of_a_router_may_be_narrower_than_its_rows() -> None:
    rows, weight = draw(5, 72), draw(12, 72, dtype=torch.bfloat16)
    assert torch.equal(multiply(rows, weight), multiply(rows, weight.float()))


@pytest.mark.parametrize("dtype", quick(list(TOLERANCES), torch.float32))
@pytest.mark.parametrize("sizes", quick([(5, 2, 24, 40), (3, 1, 70, 130)], (5, 2, 24, 40)))
def test_a_pair_is_multiplied_by_its_expert(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """More pairs of one expert than a tile has, experts without a token, and inner sizes that no step divides."""
    num_experts, num_chosen, outputs, inputs = sizes
    rows, weights = draw(45, inputs, dtype=dtype), draw(num_experts, outputs, inputs, dtype=dtype) * inputs**-0.5
    logits = draw(45, num_experts)
    logits[:, 0] = -100
    logits[5:40, 1] = 100
    chosen = choose_experts(logits, Routing(num_experts, num_chosen, "softmax"))
    ids = logits.topk(num_chosen).indices.flatten()
    found = multiply_experts(rows, weights, chosen)
    each = rows.double().repeat_interleave(num_chosen, 0)
    expected = torch.einsum("pi,poi->po", each, weights.double()[ids])
    assert_near(found, expected)
    bias = draw(num_experts, outputs, dtype=dtype)
    transposed = weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(multiply_experts(rows, transposed, chosen), found)
    assert_near(multiply_experts(rows, transposed, chosen, bias), expected + bias.double()[ids])
    again = multiply_experts(found, weights.transpose(1, 2).contiguous(), chosen)
    assert_near(again, torch.einsum("pi,poi->po", found.double(), weights.double()[ids].transpose(1, 2)))
    shared, opening = draw(45, inputs, dtype=dtype), draw(45, 1, dtype=dtype)
    weighed = (again.double().view(45, num_chosen, -1) * chosen.weights.double().unsqueeze(-1)).sum(1)
    assert_near(add_experts(again, chosen), weighed)
    own = shared.double() * functional.sigmoid(opening.double())
    assert_near(add_experts(again, chosen, shared, opening), weighed + own)


def test_products_that_differ_or_depend_on_the_batch_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mixture = mixture_of(tmp_path, "mixtral")

    assert failed_mixture_trial(mixture, torch.float32, (2, 4)) is None

    def inexact(rows: Tensor, weights: Tensor, chosen: ChosenExperts, bias: None) -> Tensor:
        return multiply_experts(rows, weights, chosen, bias) * 1.001

    def dependent(rows: Tensor, weights: Tensor, chosen: ChosenExperts, bias: None) -> Tensor:
        return multiply_experts(rows, weights, chosen, bias) * (1 + 1e-6 * (len(rows) > 1))

    for product, failure in ((inexact, "differ by 1.0e-03"), (dependent, "bits depend on the batch")):
        monkeypatch.setattr(expert_launches, "multiply_experts", product)
        assert failure in (failed_mixture_trial(mixture, torch.float32, (2,)) or "")


@pytest.mark.full
def test_packed_experts_whose_products_fail_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, num_experts = LAYOUTS["Q4_0"], 3
    monkeypatch.setattr(launches, "row_counts", lambda: (2, 4))
    panels = torch.randint(0, 256, (num_experts * 2, 2, layout.block_bytes), generator=torch.Generator().manual_seed(0))
    # Scales of such bytes are small numbers.
    panels[:, :, : layout.low_at] = 0x11
    weights = PackedExpertWeights((num_experts, 32, 64), layout)
    weights.panels = panels.to(DEVICE, torch.uint8)
    rows = draw(9, 64)
    chosen = choose_experts(draw(9, num_experts), Routing(num_experts, 2, "softmax"))
    choose_packed_products([weights], torch.float32)
    assert weights.expanded is None
    found = weights.multiply(rows, chosen)

    def inexact(*arguments: Any) -> Tensor:
        return multiply_packed_experts(*arguments) * 1.001

    monkeypatch.setattr(expert_launches, "multiply_packed_experts", inexact)
    choose_packed_products([weights], torch.float32)
    assert weights.panels is None
    assert torch.equal(weights.multiply(rows, chosen), found)
    torch.testing.assert_close(weights(1, rows), rows @ weights.matrix(1, torch.float32).T)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "chosen"])
def test_among_equal_experts_the_lower_id_wins_and_numbers_that_are_not_finite_stay_with_their_token(
    score: str,
) -> None:
    logits = torch.zeros(4, 6, device=DEVICE)
    logits[1, 4] = logits[1, 2] = 1.0
    logits[2] = torch.nan
    logits[3] = torch.tensor([torch.inf, 1.0, -torch.inf, 0.0, torch.nan, 2.0])
    chosen = choose_experts(logits, Routing(6, 3, score, num_groups=2, num_chosen_groups=2))
    counts = chosen.firsts.diff().tolist()
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    by_token: list[list[int]] = [[] for _ in range(4)]
    for expert, pair in zip(experts, chosen.pairs.tolist(), strict=True):
        by_token[pair // 3].append(expert)
    assert by_token[:2] == [[0, 1, 2], [0, 2, 4]]
    assert [len(set(each)) for each in by_token] == [3] * 4, "a token has an expert once"
    assert chosen.weights[:2].isfinite().all()
    assert chosen.weights[2].isnan().all()
