"""Mixtures of experts in the form in which the kernels for GPUs compute them.

A family's own module of transformers is the reference. Here stands what a kernel needs of it: the router's weight and
rule, the experts' weights as they lie in the module, and the layers that all tokens share.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, cast

import torch
from torch import Tensor, nn

from corolla.kernels.expert_routing import Routing
from corolla.models.packed.experts import PackedExperts, PackedExpertWeights, are_usual

if TYPE_CHECKING:
    from corolla.kernels.triton.expert_launches import ChosenExperts

# What transformers adds to the sum of a token's weights in routers that began with DeepSeek-V3.
_EPSILON: Final = 1e-20


ExpertWeights = Tensor | PackedExpertWeights
"""The weights of experts: `[experts, out, in]` in the model's dtype, on its device, or packed."""


def multiply_experts(
    rows: Tensor, weights: ExpertWeights, chosen: "ChosenExperts", bias: Tensor | None = None
) -> Tensor:
    """Multiplies the row of each pair by the weights of its expert; see `expert_launches.multiply_experts`.

    Args:
        rows: `[N, in]` or `[pairs, in]` in the model's dtype, on the device of the weights.
        chosen: the pairs.
        bias: `[experts, out]` in the same dtype; None: there is none, as of packed weights.

    Returns:
        `[pairs, out]` in the same dtype.
    """
    from corolla.kernels.triton import expert_launches

    if isinstance(weights, PackedExpertWeights):
        return weights.multiply(rows, chosen)
    return expert_launches.multiply_experts(rows, weights, chosen, bias)


def matrix_of(weights: ExpertWeights, expert: int, dtype: torch.dtype) -> Tensor:
    """The weights of one expert, `[out, in]` in `dtype`, on their device."""
    return weights.matrix(expert, dtype) if isinstance(weights, PackedExpertWeights) else weights[expert].to(dtype)


def _of_softmax(router: Any) -> Routing:
    return Routing(router.num_experts, router.top_k, "softmax", normalises=getattr(router, "norm_topk_prob", True))


def _of_chosen(router: Any) -> Routing:
    return Routing(router.num_experts, router.top_k, "chosen")


def _of_groups(router: Any) -> Routing:
    return Routing(
        router.num_experts, router.top_k, "sigmoid", normalises=router.norm_topk_prob, epsilon=_EPSILON,
        scaling=router.routed_scaling_factor, num_groups=router.num_group, num_chosen_groups=router.topk_group,
    )  # fmt: skip


def _of_sigmoid(router: Any) -> Routing:
    return Routing(router.num_experts, router.top_k, "sigmoid", normalises=True)


@dataclass(frozen=True, slots=True)
class _Router:
    """A class of routers: its rule, and in which types it computes logits and weights."""

    routing: Callable[[Any], Routing]
    is_wide: bool
    rounds_weights: bool


_GROUPED: Final = _Router(_of_groups, is_wide=True, rounds_weights=False)
_SOFTMAX: Final = _Router(_of_softmax, is_wide=False, rounds_weights=True)
_ROUTERS: Final[Mapping[str, _Router]] = {
    "MixtralTopKRouter": _Router(_of_softmax, is_wide=False, rounds_weights=False),
    "Qwen2MoeTopKRouter": _SOFTMAX,
    "Qwen3MoeTopKRouter": _SOFTMAX,
    "GptOssTopKRouter": _Router(_of_chosen, is_wide=False, rounds_weights=True),
    "GraniteMoeTopKRouter": _Router(_of_chosen, is_wide=False, rounds_weights=True),
    "Dots1TopkRouter": _GROUPED,
    "ExaoneMoeTopkRouter": _GROUPED,
    "FlexOlmoTopKRouter": _SOFTMAX,
    "Glm4MoeTopkRouter": _GROUPED,
    "MiniMaxM2TopKRouter": _Router(_of_sigmoid, is_wide=False, rounds_weights=False),
    "OlmoeTopKRouter": _SOFTMAX,
    "SolarOpenTopkRouter": _GROUPED,
}
_CORRECTION: Final = "e_score_correction_bias"
_SHARED: Final = ("shared_expert", "shared_experts")
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
        router_weight: `[experts, H]`, in the model's dtype, or in float32 where `is_wide`.
        router_bias: `[experts]`, likewise; None: there is none.
        routing: the router's rule.
        correction: float32 `[experts]`, what is added to the scores for the choice; None: nothing.
        is_wide: whether the logits are computed in float32.
        weights_dtype: the dtype to which the weights of a token's experts are rounded.
        gate_up: `[experts, 2 G, H]` in the model's dtype; of the last two dimensions, one is contiguous. Or packed.
        gate_up_bias: `[experts, 2 G]` in the model's dtype; None: there is none, as of packed weights.
        down: `[experts, H, G]`, likewise.
        down_bias: `[experts, H]`, likewise.
        activation: the activation of the gate.
        shared: the MLP that all tokens share, with `gate_proj`, `up_proj`, `down_proj` and `act_fn`; None: there is
            none.
        shared_gate: a linear layer with one output, the gate of `shared`; None: there is none.
    """

    router_weight: Tensor
    router_bias: Tensor | None
    routing: Routing
    correction: Tensor | None
    is_wide: bool
    weights_dtype: torch.dtype
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
        is_usual = isinstance(experts, PackedExperts) or are_usual(experts)
        if (
            kind is None
            or not (is_usual or _has_neighbours(experts))
            or not {name for name, _ in module.named_children()} <= _PARTS
        ):
            return None
        own = cast(Any, experts)
        gate_up, down = own.gate_up_proj, own.down_proj
        weight = cast(Any, router).weight.detach()
        return cls(
            router_weight=weight,
            router_bias=getattr(router, "bias", None),
            routing=kind.routing(router),
            correction=getattr(router, _CORRECTION, getattr(module, _CORRECTION, None)),
            is_wide=kind.is_wide,
            weights_dtype=weight.dtype if kind.rounds_weights else torch.float32,
            gate_up=gate_up if is_usual else gate_up.detach().transpose(1, 2),
            gate_up_bias=getattr(own, "gate_up_proj_bias", None),
            down=down if is_usual else down.detach().transpose(1, 2),
            down_bias=getattr(own, "down_proj_bias", None),
            activation=own.act_fn if is_usual else NeighbourGate(own.alpha, own.limit),
            shared=next((getattr(module, name) for name in _SHARED if hasattr(module, name)), None),
            shared_gate=getattr(module, "shared_expert_gate", None),
        )


def _has_neighbours(experts: Any) -> bool:
    """Returns True for the experts of gpt-oss: gate and up are neighbours, weights are `[experts, in, out]`."""
    return type(experts).__name__ == "GptOssExperts"
