"""Tries products with packed weights on a GPU when a server starts."""

import functools
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor

from corolla.kernels.kernel_trial import failure_of
from corolla.kernels.llvm_text import LANES
from corolla.kernels.product_choice import rungs
from corolla.kernels.repacking import unpack
from corolla.models.invariant import try_product
from corolla.models.mixtures import failed_experts_trial
from corolla.models.packed.modules import PackedExpertWeights, PackedLinear

AnyPacked = PackedLinear | PackedExpertWeights

log = logging.getLogger(__name__)

# The outputs of a product depend on their own weights only, so a trial looks at the first ones.
_TRIED_PANELS: Final = 16


@torch.inference_mode()
def choose_packed_products(layers: Iterable[AnyPacked], dtype: torch.dtype) -> None:
    """Tries the kernel with a layer of each shape. Where it fails, such layers get expanded weights.

    Args:
        layers: layers and experts with panels, on one GPU.
    """
    alike: defaultdict[Any, list[AnyPacked]] = defaultdict(list)
    for layer in layers:
        others = (layer.bias is None, layer.order is None) if isinstance(layer, PackedLinear) else ()
        alike[layer.layout, layer.shape, *others].append(layer)
    for (layout, shape, *_), group in alike.items():
        if (failure := failure_of(functools.partial(_failed, group[0], dtype))) is not None:
            facts = {"layout": layout.name, "shape": "x".join(map(str, shape)), "failure": failure}
            log.warning("expanding weights that the kernel cannot multiply", extra=facts)
            for layer in group:
                layer.expand(dtype)


def _failed(layer: AnyPacked, dtype: torch.dtype) -> str | None:
    """Experts are tried as one layer, as the family's own code calls them, and together."""
    if isinstance(layer, PackedLinear):
        return failed_trial(layer, dtype)
    from corolla.kernels.triton.launches import row_counts

    _, num_outputs, num_inputs = layer.shape
    first = PackedLinear(num_inputs, num_outputs, layer.layout)
    first.panels = layer.panels_of(0)
    return failed_trial(first, dtype) or failed_experts_trial(layer, dtype, 1, row_counts())


def failed_trial(layer: PackedLinear, dtype: torch.dtype) -> str | None:
    """Multiplies many random rows in calls of all sizes. Returns what failed, as a sentence's end, or None.

    Args:
        layer: a layer with panels.
    """
    panels = cast(Tensor, layer.panels)[:_TRIED_PANELS].contiguous()
    # Triton has another kernel where 16 does not divide the number of outputs; both numbers are of one kind.
    num_outputs = len(panels) * LANES - -layer.out_features % LANES
    part = PackedLinear(layer.in_features, num_outputs, layer.layout)
    # What is tried has the tile of the whole layer, so that it is what steps launch.
    part.panels, part.order, part.tiled_outputs = panels, layer.order, layer.out_features
    weight = unpack(panels, layer.layout, num_outputs).to(dtype)
    if not bool(weight.any()):
        return None  # made-up weights may be zero in this dtype
    if layer.order is not None:
        weight = torch.empty_like(weight).index_copy_(1, layer.order.long(), weight)
    return try_product(lambda rows, *_: part(rows), weight, None, rungs(num_outputs)).failure
