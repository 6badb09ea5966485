"""Runs fused modules of torch: the family's blocks with joined projections, on any device."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from corolla.compute.base import Blocks, PackedStep
from corolla.models.adapters.products import AdapterStacks
from corolla.models.fused import FusedSpan


class FusedBlocks(Blocks):
    """The fused modules of a span."""

    name: Final = "fused"

    def __init__(self, span: FusedSpan, stacks: AdapterStacks) -> None:
        super().__init__(stacks, span.layers[0].device)
        self.span = span

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """See `Blocks.forward`. `hidden` is `[N, H]` in the model's dtype, on its device."""
        return self.span.forward(hidden, step.position_ids, step.end, layers, step.batch.attend, step.adapters)
