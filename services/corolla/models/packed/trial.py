"""Tries products with packed weights on a GPU when a server starts, and times their tiles for few rows."""

import functools
import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import Tensor

from corolla.kernels.kernel_trial import are_same, failure_of
from corolla.kernels.llvm_text import LANES
from corolla.kernels.product_choice import rungs
from corolla.kernels.repacking import unpack
from corolla.models.cuda_capture import CudaCapture
from corolla.models.invariant import try_product
from corolla.models.mixtures import failed_experts_trial
from corolla.models.packed.modules import PackedExpertWeights, PackedLinear

if TYPE_CHECKING:
    from corolla.kernels.triton.packed_launches import Tile

AnyTile = TypeVar("AnyTile")
AnyPacked = PackedLinear | PackedExpertWeights

log = logging.getLogger(__name__)

# The outputs of a product depend on their own weights only, so a trial looks at the first ones.
_TRIED_PANELS: Final = 16
# Layers of one shape that are timed in turn, since weights of real steps are in memory, not in caches.
_TIMED_LAYERS: Final = 16
_TIMED_ROUNDS: Final = 5
# Another tile than the usual one has to be faster by more than this factor.
_MIN_GAIN: Final = 1.02


@torch.inference_mode()
def choose_packed_products(layers: Iterable[AnyPacked], dtype: torch.dtype) -> None:
    """Tries the fastest tile with a layer of each shape. Where it fails, such layers get expanded weights.

    Args:
        layers: layers and experts with panels, on one GPU.
    """
    alike: defaultdict[Any, list[AnyPacked]] = defaultdict(list)
    for layer in layers:
        others = (layer.bias is None, layer.order is None) if isinstance(layer, PackedLinear) else ()
        alike[layer.layout, layer.shape, *others].append(layer)
    for (layout, shape, *_), group in alike.items():
        facts = {"layout": layout.name, "shape": "x".join(map(str, shape))}
        if (failure := failure_of(functools.partial(_chosen, group, dtype, facts))) is not None:
            log.warning("expanding weights that the kernel cannot multiply", extra={**facts, "failure": failure})
            for layer in group:
                layer.expand(dtype)


def _chosen(group: Sequence[AnyPacked], dtype: torch.dtype, facts: Mapping[str, str]) -> str | None:
    """Gives the layers of a group their tile. Returns what failed, as a sentence's end, or None."""
    linears, failure = [layer for layer in group if isinstance(layer, PackedLinear)], None
    for tile in _tiles(linears[:_TIMED_LAYERS], dtype):
        if (failure := _failed(group[0], dtype, tile)) is None:
            log.info("packed product chosen", extra={**facts, "tile": "usual" if tile is None else str(tile)})
            for linear in linears:
                linear.tile = tile
            return None
        log.warning("a tile fails its trial", extra={**facts, "tile": str(tile), "failure": failure})
    return failure


def _failed(layer: AnyPacked, dtype: torch.dtype, tile: "Tile | None") -> str | None:
    """Experts are tried as one layer, as the family's own code calls them, and together."""
    if isinstance(layer, PackedLinear):
        return failed_trial(layer, dtype, tile)
    from corolla.kernels.triton.launches import row_counts

    _, num_outputs, num_inputs = layer.shape
    first = PackedLinear(num_inputs, num_outputs, layer.layout)
    first.panels = layer.panels_of(0)
    return failed_trial(first, dtype) or failed_experts_trial(layer, dtype, 1, row_counts())


def failed_trial(layer: PackedLinear, dtype: torch.dtype, tile: "Tile | None" = None) -> str | None:
    """Multiplies many random rows in calls of all sizes. Returns what failed, as a sentence's end, or None.

    Args:
        layer: a layer with panels.
        tile: see `multiply_packed`.
    """
    panels = cast(Tensor, layer.panels)[:_TRIED_PANELS].contiguous()
    # Triton has another kernel where 16 does not divide the number of outputs; both numbers are of one kind.
    num_outputs = len(panels) * LANES - -layer.out_features % LANES
    part = PackedLinear(layer.in_features, num_outputs, layer.layout)
    part.panels, part.order, part.tile = panels, layer.order, tile
    weight = unpack(panels, layer.layout, num_outputs).to(dtype)
    if not bool(weight.any()):
        return None  # made-up weights may be zero in this dtype
    if layer.order is not None:
        weight = torch.empty_like(weight).index_copy_(1, layer.order.long(), weight)
    return try_product(lambda rows, *_: part(rows), weight, None, rungs(num_outputs)).failure


def _tiles(layers: Sequence[PackedLinear], dtype: torch.dtype) -> "Sequence[Tile | None]":
    """The tiles to try: the fastest one for one row, and then the usual one; None alone: there is no choice."""
    if not layers or cast(Tensor, layers[0].panels).device.type != "cuda" or dtype == torch.float32:
        return (None,)
    from corolla.kernels.triton.kept_tiles import keep_tile, kept_tile
    from corolla.kernels.triton.packed_launches import candidates, usual_tile

    usual = usual_tile(layers[0].out_features)
    row = torch.randn(1, layers[0].in_features, device=cast(Tensor, layers[0].panels).device).to(dtype)
    tiles = candidates(layers[0].layout, dtype)
    facts = (torch.cuda.get_device_name(row.device), layers[0].layout.name, layers[0].shape, dtype, tiles)
    kept = kept_tile(repr(facts), tiles)
    if kept is None:
        kept = fastest_tile(
            usual, tiles, lambda tile: layers[0].with_tile(row, tile), lambda tile: _seconds(layers, row, tile)
        )
        keep_tile(repr(facts), tiles.index(kept))
    return tuple(dict.fromkeys((kept, usual)))


def fastest_tile(
    usual: AnyTile,
    candidates: Sequence[AnyTile],
    multiply: Callable[[AnyTile], Tensor],
    seconds: Callable[[AnyTile], float],
) -> AnyTile:
    """Returns the fastest tile that gives the bits of the usual one, and passes over tiles that do not work.

    Args:
        usual: the tile that is taken unless another one is clearly faster; one of `candidates`.
        candidates: the tiles that are tried.
        multiply: computes the same product by a tile, `[1, out]` in the dtype of rows on the weights' device.
        seconds: returns how long a product takes by a tile.
    """
    expected = multiply(usual)
    found: dict[AnyTile, float] = {}
    for tile in candidates:

        def measure(tile: AnyTile = tile) -> None:
            if are_same(multiply(tile), expected):
                found[tile] = seconds(tile)

        if (failure := failure_of(measure)) is not None:
            log.warning("a tile does not work here", extra={"tile": str(tile), "failure": failure})
    fastest = min(found, key=lambda tile: found[tile], default=usual)
    return fastest if usual in found and found[usual] > _MIN_GAIN * found[fastest] else usual


def _seconds(layers: Sequence[PackedLinear], row: Tensor, tile: "Tile | None") -> float:
    """The time of the layers' products, recorded, since launches take longer than products."""

    def multiply() -> None:
        for layer in layers:
            layer.with_tile(row, tile)

    replay = CudaCapture(row.device)(multiply, multiply)
    found: list[float] = []
    for _ in range(_TIMED_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)
