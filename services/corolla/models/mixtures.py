"""Mixtures of experts in the form in which the kernels for GPUs compute them.

A family's own module of transformers is the reference. Here stands what a kernel needs of it: the router's weight and
rule, the experts' weights as they lie in the module, and the layers that all tokens share. The products are tried with
the server's own weights before they are used.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor, nn

from corolla.kernels.expert_routing import Routing
from corolla.kernels.kernel_trial import relative_error, try_kernel
from corolla.models.invariant import TOLERANCES, try_product
from corolla.models.linear import DenseLinear
from corolla.models.packed.modules import (
    PackedExperts,
    PackedExpertWeights,
    PackedLinear,
    are_usual,
    have_neighbours,
)

if TYPE_CHECKING:
    from corolla.kernels.triton.expert_launches import ChosenExperts

ExpertWeights = Tensor | PackedExpertWeights
"""The weights of experts: `[experts, out, in]` in the model's dtype, on its device, or packed."""


def multiply_experts(
    rows: Tensor, weights: ExpertWeights, chosen: "ChosenExperts", bias: Tensor | None = None
) -> Tensor:
    """Multiplies the row of each pair by the weights of its expert; see `expert_launches.multiply_experts`.

    Args:
        rows: `[N, in]` or `[pairs, in]` in the model's dtype, on the device of the weights.
        chosen: the pairs.
        bias: `[experts, out]` in the same dtype; None: there is none.

    Returns:
        `[pairs, out]` in the same dtype.
    """
    from corolla.kernels.triton import expert_launches

    if isinstance(weights, PackedExpertWeights):
        return weights.multiply(rows, chosen, bias)
    return expert_launches.multiply_experts(rows, weights, chosen, bias)


def matrix_of(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> Tensor:
    """The weights of one expert, `[out, in]` in `dtype`, on their device."""
    return weights.matrix(expert, dtype) if isinstance(weights, PackedExpertWeights) else weights[expert].to(dtype)


@dataclass(frozen=True, slots=True)
class _Router:
    """A class of routers: what becomes of the logits, and in which types it computes logits and weights.

    Attributes:
        score: see `Routing`.
        epsilon: see `Routing`.
    """

    score: str
    is_wide: bool = False
    rounds_weights: bool = False
    epsilon: float = 0.0

    def routing(self, router: Any) -> Routing:
        """The rule of a router, from the settings that families name alike, or as below."""
        scaling = next((getattr(router, name) for name in _SCALINGS if hasattr(router, name)), 1.0)
        return Routing(
            router.num_experts, router.top_k, self.score,
            normalises=self.score in ("softmax", "sigmoid") and getattr(router, "norm_topk_prob", True),
            epsilon=self.epsilon, least_sum=getattr(router, "norm_min", 0.0), scaling=scaling,
            num_groups=getattr(router, "num_group", 1), num_chosen_groups=getattr(router, "topk_group", 1),
            nearness=2 * getattr(router, "router_jitter_noise", 0.0),
        )  # fmt: skip


_SCALINGS: Final = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
_CORRECTIONS: Final = ("e_score_correction_bias", "expert_bias")
# Such routers began with DeepSeek-V3. The epsilon is what transformers adds to the sum of a token's weights.
_GROUPED: Final = _Router("sigmoid", is_wide=True, epsilon=1e-20)
_SOFTMAX: Final = _Router("softmax", rounds_weights=True)
_ROUTERS: Final[Mapping[str, _Router]] = {
    "AfmoeTokenChoiceRouter": _Router("sigmoid", epsilon=1e-20),
    "MixtralTopKRouter": _Router("softmax"),
    "Qwen2MoeTopKRouter": _SOFTMAX,
    "Qwen3MoeTopKRouter": _SOFTMAX,
    "GptOssTopKRouter": _Router("chosen", rounds_weights=True),
    "GraniteMoeTopKRouter": _Router("chosen", rounds_weights=True),
    "DeepseekV3TopkRouter": _GROUPED,
    "Dots1TopkRouter": _GROUPED,
    "Ernie4_5_MoeTopKRouter": _Router("softmax", is_wide=True, rounds_weights=True),
    "ExaoneMoeTopkRouter": _GROUPED,
    "FlexOlmoTopKRouter": _SOFTMAX,
    "Glm4MoeLiteTopkRouter": _GROUPED,
    "Glm4MoeTopkRouter": _GROUPED,
    "GraniteMoeHybridTopKRouter": _Router("chosen", rounds_weights=True),
    "HYV3TopKRouter": _GROUPED,
    "HunYuanMoEV1Gate": _SOFTMAX,
    "KimiLinearTopkRouter": _GROUPED,
    "MiniMaxM2TopKRouter": _Router("sigmoid"),
    "OlmoeTopKRouter": _SOFTMAX,
    "PhimoeTopKRouter": _Router("near", rounds_weights=True),
    "Qwen3NextTopKRouter": _SOFTMAX,
    "Qwen3_5MoeTopKRouter": _SOFTMAX,
    "SolarOpenTopkRouter": _GROUPED,
}
_SHARED: Final = ("shared_expert", "shared_experts", "shared_mlp")
# Modules of a mixture that `Mixture` knows; with another one it would leave something out.
_PARTS: Final = frozenset({"gate", "router", "experts", "shared_expert_gate", *_SHARED})


@dataclass(frozen=True, slots=True)
class NeighbourGate:
    """The gate of gpt-oss: each of its numbers stands before the one it is multiplied by; see `gate_neighbours`.

    Attributes:
        alpha: the factor in the logistic function.
        limit: the bound of the gate from above, and of the other numbers on both sides.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. Its tensors are on one device.

    Attributes:
        router: the linear layer that makes the logits; None: the router itself multiplies by the next two.
        router_weight: `[experts, H]`, in the model's dtype, or in float32 where `is_wide`.
        router_bias: `[experts]`, likewise; None: there is none.
        routing: the router's rule.
        correction: float32 `[experts]`, what is added to the scores for the choice; None: nothing.
        is_wide: whether the logits are computed in float32.
        rounds_weights: whether the weights of a token's experts are rounded to the model's dtype.
        gate_up: `[experts, 2 G, H]` in the model's dtype; of the last two dimensions, one is contiguous. Or packed.
        gate_up_bias: `[experts, 2 G]` in the model's dtype; None: there is none.
        down: `[experts, H, G]`, likewise.
        down_bias: `[experts, H]`, likewise.
        activation: the activation of the gate.
        shared: the MLP that all tokens share, with `gate_proj`, `up_proj`, `down_proj` and `act_fn`; None: there is
            none.
        shared_gate: a linear layer with one output, the gate of `shared`; None: there is none.
    """

    router: nn.Module | None
    router_weight: Tensor | None
    router_bias: Tensor | None
    routing: Routing
    correction: Tensor | None
    is_wide: bool
    rounds_weights: bool
    gate_up: ExpertWeights
    gate_up_bias: Tensor | None
    down: ExpertWeights
    down_bias: Tensor | None
    activation: nn.Module | NeighbourGate
    shared: Any
    shared_gate: nn.Module | None

    @property
    def kind(self) -> Hashable:
        """What its kernels depend on, weights not counted."""
        layouts = (getattr(weights, "layout", None) for weights in (self.gate_up, self.down))
        return (tuple(self.gate_up.shape), self.routing, *layouts)

    @classmethod
    def from_module(cls, module: Any) -> Self | None:
        """The mixture that a family's module computes, judged by the classes of its parts; None: it is another one."""
        router, experts = getattr(module, "gate", getattr(module, "router", None)), getattr(module, "experts", None)
        kind = _ROUTERS.get(type(router).__name__)
        if (
            kind is None
            or not (isinstance(experts, PackedExperts) or are_usual(experts) or have_neighbours(experts))
            or not {name for name, _ in module.named_children()} <= _PARTS
        ):
            return None
        own = cast(Any, experts)
        of_router = list(cast(Any, router).children())
        layer = next((each for each in of_router if isinstance(each, DenseLinear | PackedLinear)), None)
        corrections = (getattr(each, name, None) for each in (router, *of_router, module) for name in _CORRECTIONS)
        correction = next((each for each in corrections if each is not None), None)
        return cls(
            router=layer,
            router_weight=None if layer is not None else cast(Any, router).weight.detach(),
            router_bias=getattr(router, "bias", None),
            routing=kind.routing(router),
            correction=None if correction is None else correction.detach().flatten(),
            is_wide=kind.is_wide,
            rounds_weights=kind.rounds_weights,
            gate_up=_of_outputs(own, own.gate_up_proj),
            gate_up_bias=getattr(own, "gate_up_proj_bias", None),
            down=_of_outputs(own, own.down_proj),
            down_bias=getattr(own, "down_proj_bias", None),
            activation=own.act_fn if hasattr(own, "act_fn") else NeighbourGate(own.alpha, own.limit),
            shared=next((getattr(module, name) for name in _SHARED if hasattr(module, name)), None),
            shared_gate=getattr(module, "shared_expert_gate", None),
        )


def _of_outputs(experts: Any, weights: ExpertWeights) -> ExpertWeights:
    """The weights as `[experts, out, in]`, as packed ones are in any case."""
    return weights.detach().transpose(1, 2) if isinstance(weights, Tensor) and experts.is_transposed else weights


# The product in float64 is computed for about so many outputs only; all weights in float64 may not fit into memory.
_CHECKED_OUTPUTS: Final = 128
# Calls of single tokens are many, so only so many tokens are tried one by one.
_SINGLE_TOKENS: Final = 16


@torch.inference_mode()
def failed_mixture_trial(mixture: Mixture, dtype: torch.dtype, row_counts: Sequence[int]) -> str | None:
    """Returns what failed, as a sentence's end, or None if the products hold.

    They hold if each token and each pair has the same bits in calls of all sizes, near the numbers of float64. These
    calls are of the kinds that steps have, so that Triton compiles nothing while a server serves.

    Args:
        row_counts: for how many rows of an expert a product takes each of its tiles, in rising order.
    """
    num_chosen = mixture.routing.num_chosen
    # A token's pairs share its row, and have rows of their own behind the gate.
    return (
        _failed_router(mixture, (1, *row_counts))
        or failed_experts_trial(mixture.gate_up, dtype, num_chosen, row_counts, bias=mixture.gate_up_bias)
        or failed_experts_trial(mixture.down, dtype, num_chosen, row_counts, num_chosen, mixture.down_bias)
    )


@torch.inference_mode()
def failed_experts_trial(
    weights: ExpertWeights,
    dtype: torch.dtype,
    num_chosen: int,
    row_counts: Sequence[int],
    rows_of_token: int = 1,
    bias: Tensor | None = None,
) -> str | None:
    """Does what `failed_mixture_trial` does, for the products of one weight.

    Args:
        num_chosen: how many experts a token gets.
        row_counts: for how many rows of an expert a product takes each of its tiles, in rising order.
        rows_of_token: 1, or `num_chosen`: each pair has a row of its own.
        bias: `[experts, out]` in `dtype`, on the device of the weights; None: there is none.
    """
    num_experts, _, num_inputs = weights.shape
    device = matrix_of(weights, 0, dtype).device
    if not any(bool(matrix_of(weights, expert, dtype).any()) for expert in range(num_experts)):
        return None  # made-up weights may be zero in this dtype
    routing = Routing(num_experts, num_chosen, "chosen")
    sizes = [-(-count * num_experts // num_chosen) for count in row_counts]
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(sizes[-1], rows_of_token, num_inputs, generator=generator, device=device).to(dtype)
    logits = torch.randn(sizes[-1], num_experts, generator=generator, device=device)

    def run(size: int) -> Iterator[Tensor]:
        num_tokens = _SINGLE_TOKENS if size == 1 else len(rows)
        for part, own in zip(torch.split(rows[:num_tokens], size), torch.split(logits[:num_tokens], size), strict=True):
            yield _products(part, own, weights, bias, routing)

    trial = try_kernel(
        run, (sizes[-1], 1, *sizes[:-1]), lambda whole: _error(whole, rows, logits, weights, bias), TOLERANCES[dtype]
    )
    return trial.failure and f"products of its experts: {trial.failure}"


def _failed_router(mixture: Mixture, ladder: tuple[int, ...]) -> str | None:
    from corolla.kernels.triton.launches import multiply

    own, bias = mixture.router_weight, mixture.router_bias
    if own is None:
        return None  # the product of a linear layer is chosen like those of others
    # A router may be narrower than its rows; the trial draws rows like the weight.
    weight = own.float() if mixture.is_wide else own
    trial = try_product(lambda rows, *_: multiply(rows, own, bias), weight, bias, ladder)
    return trial.failure and f"the product of its router: {trial.failure}"


def _products(rows: Tensor, logits: Tensor, weights: ExpertWeights, bias: Tensor | None, routing: Routing) -> Tensor:
    """The product of each token with each of its experts: `[N, chosen, out]`."""
    from corolla.kernels.triton.expert_launches import choose_experts

    found = multiply_experts(rows.flatten(0, 1), weights, choose_experts(logits, routing), bias)
    return found.view(len(rows), routing.num_chosen, -1)


def _error(found: Tensor, rows: Tensor, logits: Tensor, weights: ExpertWeights, bias: Tensor | None) -> float:
    """The largest difference from the product in float64, as a part of its largest number."""
    step = -(-weights.shape[1] // _CHECKED_OUTPUTS)
    ids = logits.topk(found.shape[1]).indices
    rows = rows.expand(-1, found.shape[1], -1)
    found = found[..., ::step].double()
    expected = torch.empty_like(found)
    for expert in range(logits.shape[1]):
        tokens, ranks = torch.where(ids == expert)
        own = rows[tokens, ranks].double() @ matrix_of(weights, expert, rows.dtype)[::step].double().T
        expected[tokens, ranks] = own if bias is None else own + bias[expert, ::step].double()
    return relative_error(found, expected)
