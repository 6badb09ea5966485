"""Experts of mixtures that keep their weights packed as in the file, on a CPU or a GPU."""

from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.kernels.layouts import Layout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import multiplied
from corolla.kernels.repacking import unpack

if TYPE_CHECKING:
    from corolla.kernels.triton.expert_launches import ChosenExperts
    from corolla.kernels.triton.packed_launches import PanelViews

EXPERT_WEIGHTS: Final = ("gate_up_proj", "down_proj")
"""The names of experts' weights, `[experts, out, in]`, within their module."""
# The module of transformers that gives experts their usual gate.
_LIBRARY: Final = "transformers.integrations.moe"


def are_usual(experts: Any) -> bool:
    """Returns True if experts have gate and up in one tensor, `[experts, out, in]`, and nothing else."""
    # A family with another gate brings a function of its own.
    gate = getattr(type(experts), "_apply_gate", None)
    return (
        getattr(gate, "__module__", None) == _LIBRARY
        and experts.has_gate
        and experts.is_concatenated
        and not (experts.is_transposed or experts.has_bias or experts.has_post_expert_norm)
    )


class PackedExpertWeights(nn.Module):
    """One weight of all experts of a layer. Products are computed as in `PackedLinear`.

    Args:
        shape: `[experts, out, in]`, where `out` is a multiple of 16.

    Attributes:
        shape: the shape of the weights.
        panels: uint8 `[panels, blocks, bytes of a block]`, see `repack`: those of one expert after those of another;
            None until they are read.
        expanded: `shape` in the rows' dtype, on a GPU whose kernels fail; then there are no panels. None otherwise.
    """

    panels: Tensor | None
    expanded: Tensor | None

    def __init__(self, shape: tuple[int, int, int], layout: Layout) -> None:
        super().__init__()
        self.shape = shape
        self.layout = layout
        self.register_buffer("panels", None, persistent=False)
        self.register_buffer("expanded", None, persistent=False)
        self._views: PanelViews | None = None

    def panels_of(self, expert: int) -> Tensor:
        """The panels of one expert, uint8 `[panels of an expert, blocks, bytes of a block]`: a view of `panels`."""
        num_panels = self.shape[1] // LANES
        return cast(Tensor, self.panels).narrow(0, expert * num_panels, num_panels)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The weights of one expert, expanded, `[out, in]` in `dtype`, on their device."""
        if self.expanded is not None:
            return self.expanded[expert]
        return unpack(self.panels_of(expert), self.layout, self.shape[1]).to(dtype)

    def forward(self, expert: int, rows: Tensor) -> Tensor:
        """Multiplies `rows`, `[R, in]` on the device of the weights, by an expert's weights; returns `[R, out]`."""
        if self.expanded is not None:
            return functional.linear(rows, self.expanded[expert])
        panels, num_outputs = self.panels_of(expert), self.shape[1]
        if panels.device.type == "cpu":
            return multiplied(self.layout, rows, panels, num_outputs, None, None)
        from corolla.kernels.triton.packed_launches import multiply_packed

        return multiply_packed(self.layout, rows, panels, num_outputs)

    def multiply(self, rows: Tensor, chosen: "ChosenExperts") -> Tensor:
        """Multiplies the rows of pairs by Triton kernels; see `expert_launches.multiply_experts`.

        Args:
            rows: `[N, in]` or `[pairs, in]`, on the device of the weights.
            chosen: the pairs.

        Returns:
            `[pairs, out]` in the same dtype.
        """
        from corolla.kernels.triton.expert_launches import multiply_experts, multiply_packed_experts
        from corolla.kernels.triton.packed_launches import PanelViews

        if self.expanded is not None:
            return multiply_experts(rows, self.expanded, chosen)
        panels = cast(Tensor, self.panels)
        if self._views is None or self._views.panels is not panels:
            self._views = PanelViews.of(panels, self.layout)
        return multiply_packed_experts(self.layout, rows, self._views, self.shape[1], chosen)

    def expand(self, dtype: torch.dtype) -> None:
        """Replaces the panels by expanded weights in the rows' dtype, on their device."""
        expanded = torch.empty(self.shape, dtype=dtype, device=cast(Tensor, self.panels).device)
        for expert, matrix in enumerate(expanded):
            matrix.copy_(self.matrix(expert, dtype))
        self.expanded, self.panels, self._views = expanded, None, None

    def extra_repr(self) -> str:
        return f"{self.shape}, layout={self.layout.name}"


class PackedExperts(nn.Module):
    """Computes what usual experts of transformers compute, with weights some of which stay packed.

    Args:
        experts: the experts; `are_usual` is true for them.

    Attributes:
        gate_up_proj: `[experts, 2 G, H]`, a parameter or packed weights.
        down_proj: `[experts, H, G]`, likewise.
        act_fn: the activation of the gate.
    """

    gate_up_proj: nn.Parameter | PackedExpertWeights
    down_proj: nn.Parameter | PackedExpertWeights

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = experts.gate_up_proj, experts.down_proj, experts.act_fn

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Runs the chosen experts of each token, one expert after the other.

        Args:
            hidden: `[N, H]`, on the device of the weights.
            ids: int64 `[N, chosen]`, the experts of each token.
            weights: `[N, chosen]`, the factors of their results.

        Returns:
            `[N, H]` in the dtype of `hidden`.
        """
        num_tokens, num_chosen = ids.shape
        pairs = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.gate_up_proj.shape[0]).tolist()
        results = hidden.new_empty(len(pairs), hidden.shape[-1])
        for expert, own in enumerate(torch.split(pairs, counts)):
            if len(own):
                gate, up = _product(hidden[own // num_chosen], self.gate_up_proj, expert).chunk(2, dim=-1)
                results[own] = _product(self.act_fn(gate) * up, self.down_proj, expert)
        weighed = results.view(num_tokens, num_chosen, -1) * weights.unsqueeze(-1)
        return weighed.sum(1).to(hidden.dtype)


def _product(rows: Tensor, weights: nn.Parameter | PackedExpertWeights, expert: int) -> Tensor:
    if isinstance(weights, PackedExpertWeights):
        return cast(Tensor, weights(expert, rows))
    return functional.linear(rows, weights[expert])
