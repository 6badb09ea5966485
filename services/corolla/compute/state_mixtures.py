"""The routers of mixtures in blocks with recurrent states: no token changes another's bits; see `state_parts`.

All tensors of a call are on the CPU.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corolla.models.linear import DenseLinear, choose_products
from corolla.models.product_rule import Way
from corolla.models.whole_vectors import in_whole_vectors


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
