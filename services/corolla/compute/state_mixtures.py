"""Mixtures of experts in blocks with recurrent states: no token changes another's bits; see `state_parts`.

All tensors of a call are on the CPU.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from corolla.compute.whole_vectors import apart, in_whole_vectors
from corolla.models.linear import DenseLinear, choose_products
from corolla.models.packed.modules import PackedExperts, PackedExpertWeights
from corolla.models.product_rule import Way


class Router:
    """Chooses experts by a family's own code, which gets scores: its weights are those of a product with one.

    The scores are a product with panels, in float32.

    Args:
        gate: the family's module, whose only product is that of tokens with `weight`, `[experts, H]`.
        others: what else it gets.
    """

    def __init__(self, gate: nn.Module, others: Sequence[Tensor]) -> None:
        weight: Tensor = gate.weight  # type: ignore[assignment]
        # The family's own code still reads its weight.
        scores = weight.detach().to(torch.float32, copy=True)
        self._scores = DenseLinear(nn.Parameter(scores, requires_grad=False))
        choose_products([self._scores], asked_for=Way.PANELS)
        self._others = tuple(others)
        chooser: Any = copy.copy(gate)
        chooser._parameters = {
            **gate._parameters,
            "weight": nn.Parameter(torch.eye(len(weight)), requires_grad=False),
        }
        chooser.hidden_dim = len(weight)
        self._chooser = chooser

    def choose(self, normed: Tensor, product: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Chooses the experts of each token.

        Args:
            normed: `[N, H]` in the model's dtype.
            product: see `Rows.product`.

        Returns:
            The factors of the experts' results, `[N, chosen]` in float32, and their numbers, int64 `[N, chosen]`.
        """
        parts = in_whole_vectors(product(self._scores, normed.float()))
        chosen = [self._chooser(part, *self._others) for part in parts]
        weights, ids = (torch.cat([each[which] for each in chosen])[: len(normed)] for which in (1, 2))
        return weights, ids


class PanelExperts:
    """Experts whose weights lie in panels.

    Args:
        experts: the module; both of its weights are packed.
    """

    def __init__(self, experts: PackedExperts) -> None:
        self._experts: Any = experts

    @classmethod
    def of(cls, experts: nn.Module) -> "PanelExperts | None":
        """The experts of a mixture; None: their weights are plain."""
        if not isinstance(experts, PackedExperts):
            return None
        weights = (experts.gate_up_proj, experts.down_proj)
        return cls(experts) if all(isinstance(each, PackedExpertWeights) for each in weights) else None

    def mix(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs the chosen experts of each token.

        Args:
            tokens: `[N, H]`.
            ids: int64 `[N, chosen]`, the experts of each token.
            weights: `[N, chosen]`, the factors of their results.

        Returns:
            `[N, H]` in the dtype of `tokens`.
        """
        if self._experts.compiled_panels(tokens.dtype) is not None:
            return cast(Tensor, self._experts(tokens, ids, weights))
        num_chosen = ids.shape[1]
        # The pairs of a token and an expert, expert after expert.
        of_pairs, pairs = ids.flatten().sort(stable=True)
        experts, counts = torch.unique_consecutive(of_pairs, return_counts=True)
        groups = list(zip(experts.tolist(), counts.tolist(), strict=True))
        gate, up = _products(tokens[pairs // num_chosen], groups, self._experts.gate_up_proj).chunk(2, dim=-1)
        results = torch.empty(len(pairs), tokens.shape[1], dtype=tokens.dtype)
        results[pairs] = _products(apart(self._experts.act_fn, gate) * up, groups, self._experts.down_proj)
        weighed = results.view(len(tokens), num_chosen, -1) * weights.unsqueeze(-1)
        # torch's own sum adds in an order that depends on where the numbers lie.
        mixed = weighed[:, 0]
        for number in range(1, num_chosen):
            mixed = mixed + weighed[:, number]
        return mixed.to(tokens.dtype)


def _products(tokens: Tensor, groups: Sequence[tuple[int, int]], weights: PackedExpertWeights) -> Tensor:
    """The products of tokens, of which so many neighbours belong to each expert."""
    parts = torch.split(tokens, [count for _, count in groups])
    return torch.cat([weights(expert, part) for (expert, _), part in zip(groups, parts, strict=True)])
