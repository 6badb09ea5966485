"""Linear layers that multiply in the way that measurements found to be the fastest on this machine.

The plain way is torch's function for `nn.Linear`. It takes weights in any layout, and on CPUs it does not profit from
using the same weights again. Two other ways do: compiled functions multiply by panels (see `kernels/layouts`), and
oneDNN by a copy in its own layout. They are up to three times as fast, from a single row to a long prompt, but not for
every dtype, shape and machine. So all ways are timed once, when a model is loaded, with the real weights. If another
way wins, the plain weights are freed. Plain weights have the model's dtype, and panels are uint8. Timed weights,
panels and oneDNN's copies are on the CPU.
"""

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.chassis import heap
from corolla.kernels.layouts import PlainLayout
from corolla.kernels.llvm_text import LANES
from corolla.kernels.products import multiplied, plain_layout
from corolla.kernels.repacking import empty_matrices
from corolla.kernels.repacking import lay_out as lay_out_panels
from corolla.models.invariant_products import InvariantProduct, Product, choose_invariant_product

Multiply = Callable[[Tensor, Tensor], Tensor]
"""A function from rows `[R, in]` and laid-out weights to their product `[R, out]`."""

log = logging.getLogger(__name__)

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# The numbers of rows of one session's step, of many sessions' common step, and of a part of a prompt.
_TIMED_ROWS: Final = (1, 8, 64)
_MIN_REPETITIONS: Final = 3
_MAX_REPETITIONS: Final = 12
# More layers are timed than the processor's caches hold, so that weights come from memory, as in real steps.
_MAX_TIMED_LAYERS: Final = 32
_MAX_TIMED_BYTES: Final = 1 << 28
# Weights take memory twice while they are timed, so at most this share of a model is timed, or `MIN_TIMED_BYTES` if
# that is more.
_MAX_TIMED_SHARE: Final = 0.2
MIN_TIMED_BYTES: Final = 8 << 20
# A layer that alone exceeds the limit of timed bytes, such as a model's head, is laid out in at most `_MAX_PIECES` runs
# of its outputs. The length of each run but the last is a multiple of `_OUTPUTS_OF_LAYOUT`.
_MAX_PIECES: Final = 8
_OUTPUTS_OF_LAYOUT: Final = 64
# If other code reads a layer's plain weights, too, weights above this size are not copied to another layout.
MAX_COPIED_BYTES: Final = 256 << 20
# oneDNN's copy replaces the plain weights only if it is faster by more than this factor.
_MIN_GAIN: Final = 1.05
# Panels are chosen if they reach this share of the fastest way's speed: with panels, one call can run whole blocks,
# which gains more than the products lose. With matrix instructions (AMX), oneDNN is several times as fast as panels.
_MIN_SHARE_OF_PANELS: Final = 0.7
# If one way is faster by this factor, the measurement ends early.
_CLEAR_GAIN: Final = 1.25
# oneDNN's layout is the same for all small numbers of rows, and is good for larger ones.
_ROWS_OF_LAYOUT: Final = 16
_MAX_ROUNDINGS: Final = 16
_ROWS_OF_PIECE: Final = 1024


class TunedLinear(nn.Module):
    """Computes `x W^T + b` as `nn.Linear` does: on a CPU in the fastest of three ways, on a GPU by the rule.

    The rule is that no row of a product depends on the other rows of the call; see `kernels/product_choice`.

    Attributes:
        weight: `[out, in]`, the parameter of the replaced layer; once `panels` or `relaid` holds its numbers, a
            parameter on the meta device with the same shape and dtype.
        bias: `[out]` or None.
        panels: uint8 `[panels, blocks, bytes of a block]` in `layout`, for compiled functions; None: they are not used.
        relaid: the weights for oneDNN's kernels, by runs of outputs: in oneDNN's layout, or the plain ones if they are
            large and other code reads them, too. Empty: oneDNN's kernels are not used.
        invariant: the product that keeps the rule, on a GPU; None: there is none, or the weights are on a CPU.
        parts: layers whose weights are views of this layer's weights, and are freed together with these.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None, parts: Sequence[nn.Linear] = ()) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.panels: Tensor | None = None
        self.relaid: tuple[Tensor, ...] = ()
        self.invariant: InvariantProduct | None = None
        self.parts = tuple(parts)

    @property
    def layout(self) -> PlainLayout | None:
        """The layout of `panels`; None where these weights cannot be laid out as panels."""
        return _layout_of(self.weight)

    @property
    def way(self) -> str:
        """How the layer multiplies: `library` (torch's function), `onednn`, `panels`, or a key of PRODUCTS."""
        if self.invariant is not None:
            return self.invariant.name
        if self.panels is not None:
            return "panels"
        return "onednn" if self.relaid else "library"

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `rows`, `[..., in]` on the weight's device; returns `[..., out]` in the same dtype."""
        if self.invariant is not None and rows.dim() == 2:
            return self.invariant(rows, self.weight, self.bias)
        if self.panels is not None and self.layout is not None:
            return multiplied(self.layout, rows, self.panels, self.weight.shape[0], self.bias)
        if not self.relaid and self.invariant is None:
            return functional.linear(rows, self.weight, self.bias)
        if rows.dim() != 2:
            return self.forward(rows.flatten(0, -2)).reshape(*rows.shape[:-1], self.weight.shape[0])
        num_rows = rows.shape[0]
        num_padded = padded(num_rows)
        if num_padded == num_rows:
            return self._multiply(rows)
        rows = functional.pad(rows, (0, 0, 0, num_padded - num_rows))
        return self._multiply(rows)[:num_rows]

    def _multiply(self, rows: Tensor) -> Tensor:
        if len(self.relaid) == 1:
            return multiply_relaid(rows, self.relaid[0], self.bias)
        num_outputs = [piece.shape[0] for piece in self.relaid]
        biases = (None,) * len(num_outputs) if self.bias is None else torch.split(self.bias, num_outputs)
        parts = zip(self.relaid, biases, strict=True)
        return torch.cat([multiply_relaid(rows, piece, bias) for piece, bias in parts], dim=-1)

    def use(self, *relaid: Tensor) -> None:
        """Makes the layer multiply by `relaid`, together `[out, in]`, with oneDNN.

        The plain weights are freed unless they are `relaid`.
        """
        if relaid[0] is not self.weight:
            self._give_up_weight()
        self.relaid = relaid

    def use_panels(self, panels: Tensor) -> None:
        """Makes the layer multiply by `panels`, uint8 `[panels, blocks, bytes of a block]`, with compiled functions.

        The plain weights are freed.
        """
        self._give_up_weight()
        self.panels = panels

    def _give_up_weight(self) -> None:
        self.weight = _without_numbers(self.weight)
        for part in self.parts:
            part.weight = _without_numbers(part.weight)


def _without_numbers(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.to("meta"), requires_grad=False)


def _layout_of(weight: Tensor) -> PlainLayout | None:
    layout = plain_layout(weight.dtype)
    return layout if layout is not None and weight.shape[1] % layout.block_weights == 0 else None


def padded(num_rows: int) -> int:
    """The number of rows to which a batch is padded: at most an eighth more.

    oneDNN makes a kernel for each number of rows and keeps the last thousand kernels, which can be half a gigabyte. So
    only few numbers are used: all up to 16, then eight for each doubling.
    """
    step = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step


def multiply_relaid(rows: Tensor, relaid: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `rows W^T + b`, `[..., out]`, with oneDNN.

    Args:
        rows: `[..., in]` on the CPU.
        relaid: the result of `relay` in the rows' dtype, or plain weights `[out, in]`, which oneDNN lays out anew in
            each call with several rows.
        bias: `[out]` or None.
    """
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(rows, relaid, bias, "none", (), ""))


def relay(weight: Tensor) -> Tensor:
    """A copy of `weight`, `[out, in]`, in the layout of oneDNN's kernels; only `multiply_relaid` can read it."""
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_OF_LAYOUT))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own linear layer with ordinary weights; quantised layers must not be changed."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def ways_by_shape(layers: Iterable[TunedLinear]) -> dict[str, str]:
    """How layers multiply, by the shape of their weights, such as `4096x14336` (outputs, inputs).

    Where layers of one shape multiply in different ways, the names of these ways are joined by `+`.
    """
    ways: defaultdict[str, set[str]] = defaultdict(set)
    for layer in layers:
        num_outputs, num_inputs = layer.weight.shape
        ways[f"{num_outputs}x{num_inputs}"].add(layer.way)
    return {shape: "+".join(sorted(names)) for shape, names in ways.items()}


def replace_linears(root: nn.Module, kept: Collection[str] = ()) -> list[TunedLinear]:
    """Replaces every plain linear layer below `root` by a TunedLinear with the same parameters; returns the new layers.

    Args:
        root: the model.
        kept: names, within their blocks, of layers that are not replaced, since other code reads their weights.
    """
    replaced: list[TunedLinear] = []
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and name not in kept:
                tuned = TunedLinear(cast(nn.Parameter, child.weight), cast(nn.Parameter | None, child.bias))
                setattr(parent, name, tuned)
                replaced.append(tuned)
    return replaced


@torch.no_grad()
def tune(
    layers: Iterable[TunedLinear],
    *,
    shared: Collection[Tensor] = (),
    budget_s: float = 2.0,
) -> None:
    """Times the ways to multiply, for all layers of a shape together, and lays their weights out for the fastest way.

    On a GPU it chooses products by the rule instead, see `make_invariant`; that takes no part of the budget.

    Args:
        layers: layers on one device.
        shared: weights `[out, in]` that other code reads, too. They are not changed, and large ones are not copied
            either. All other weights belong to the layers alone.
        budget_s: how long to measure. Layers for which no time was left multiply as `nn.Linear` does, or by panels if
            panels win on the measured layers.
    """
    deadline_s = time.perf_counter() + budget_s
    held = {id(weight) for weight in shared}
    layers = list(layers)
    make_invariant(layer for layer in layers if layer.weight.device.type == "cuda")
    share = int(_MAX_TIMED_SHARE * sum(layer.weight.nbytes for layer in layers))
    max_bytes = min(_MAX_TIMED_BYTES, max(MIN_TIMED_BYTES, share))
    alike: defaultdict[tuple[Any, ...], list[TunedLinear]] = defaultdict(list)
    for layer in layers:
        if layer.weight.device.type == "cpu" and layer.weight.dtype in _TYPES:
            alike[layer.weight.dtype, layer.weight.shape, id(layer.weight) in held].append(layer)
    groups = [_Group(layers, is_held, max_bytes) for (*_, is_held), layers in alike.items()]
    # Half of the time is for the decision about panels, the rest for oneDNN's copies of layers that get no panels.
    if _panels_win(groups, deadline_s - budget_s / 2):
        log.info("laid the weights out as panels")
        for group in groups:
            if group.layout is not None:
                num_outputs, num_inputs = group.layers[0].weight.shape
                rooms = empty_matrices(len(group.layers), num_outputs, num_inputs, group.layout)
                for layer, room in zip(group.layers, rooms, strict=True):
                    leave = _discard if layer.weight.nbytes > max_bytes else None
                    layer.use_panels(lay_out_panels(layer.weight, group.layout, room, leave))
    for group in groups:
        if group.layers[0].panels is None and (group.relaid_gain(deadline_s) or 0.0) > _MIN_GAIN:
            for layer in group.layers:
                group.relay(layer)


# The order of a library's sums depends on the shape of weights, not on their numbers.
_CHOSEN: Final[dict[tuple[Any, ...], InvariantProduct | None]] = {}


def make_invariant(layers: Iterable[TunedLinear], products: Mapping[str, Product] | None = None) -> None:
    """Chooses products that keep each row of a layer's output apart from the other rows of a call.

    Args:
        layers: layers with plain weights. Layers of one shape, with a bias or without one, get the same product.
        products: see `choose_invariant_product`. None: what this process has chosen for a shape before is kept.
    """
    chosen = _CHOSEN if products is None else {}
    for layer in layers:
        if layer.weight.dtype not in _TYPES:
            continue
        key = (tuple(layer.weight.shape), layer.weight.dtype, layer.weight.device, layer.bias is None)
        if key not in chosen:
            chosen[key] = choose_invariant_product(layer.weight, layer.bias, products)
        layer.invariant = chosen[key]


class _Group:
    """Layers whose weights have one shape and dtype.

    Attributes:
        layers: the layers.
        is_held: whether other code reads their weights, too.
        layout: the layout of panels that can replace the weights; None where that is not possible.
    """

    def __init__(self, layers: Sequence[TunedLinear], is_held: bool, max_bytes: int) -> None:
        self.layers = layers
        self.is_held = is_held
        self.layout = None if is_held else layers[0].layout
        self._is_copied = not is_held or layers[0].weight.nbytes <= MAX_COPIED_BYTES
        self._max_bytes = max_bytes

    def pieces(self, layer: TunedLinear) -> tuple[Tensor, ...]:
        """A layer's weight, in several runs of rows if it is large: a run takes memory twice while it is laid out."""
        weight = layer.weight
        if not self._is_copied or weight.nbytes <= self._max_bytes:
            return (weight,)
        num_rows = -(-weight.shape[0] // _MAX_PIECES)
        return torch.split(weight.detach(), -(-num_rows // _OUTPUTS_OF_LAYOUT) * _OUTPUTS_OF_LAYOUT)

    @property
    def timed(self) -> list[Tensor]:
        """The weights with which the ways to multiply are timed."""
        pieces = itertools.chain.from_iterable(map(self.pieces, self.layers))
        num_timed = max(1, min(_MAX_TIMED_LAYERS, self._max_bytes // max(1, self.pieces(self.layers[0])[0].nbytes)))
        return list(itertools.islice(pieces, num_timed))

    def relaid_gain(self, deadline_s: float) -> float | None:
        """The speedup by oneDNN; 0 if it has no kernel or its product differs, None if there was no time."""
        weights = self.timed
        try:
            relaid = [self._lay_out(weight) for weight in weights]
            if not _agrees(weights[0], relaid[0], multiply_relaid):
                return 0.0
        except (RuntimeError, AttributeError):
            return 0.0  # no kernel for this type on this machine
        return _mean_gain(weights, relaid, multiply_relaid, deadline_s)

    def relay(self, layer: TunedLinear) -> None:
        """Lays a layer's weights out for oneDNN, piece by piece, and makes the layer use them."""
        pieces, relaid = self.pieces(layer), []
        for piece in pieces:
            relaid.append(self._lay_out(piece))
            if len(pieces) > 1 and not self.is_held:
                _discard(piece)
        layer.use(*relaid)

    def _lay_out(self, weight: Tensor) -> Tensor:
        return relay(weight) if self._is_copied else weight


def _panels_win(groups: Iterable[_Group], deadline_s: float) -> bool:
    """Whether panels are nearly as fast as the fastest way, in the mean over all measured layers that can have panels.

    The layers get panels together or not at all, since compiled blocks need panels everywhere.
    """
    shares = []
    for group in groups:
        if group.layout is not None and time.perf_counter() < deadline_s:
            panel_gain, gain = _panel_gain(group.timed, group.layout, deadline_s), group.relaid_gain(deadline_s)
            if panel_gain is None or gain is None:
                break
            shares.append(panel_gain / max(1.0, gain))
    return bool(shares) and math.prod(shares) > _MIN_SHARE_OF_PANELS ** len(shares)


def _discard(part: Tensor) -> None:
    heap.discard(part.data_ptr(), part.nbytes)


def _panel_gain(weights: Sequence[Tensor], layout: PlainLayout, deadline_s: float) -> float | None:
    """The speedup by panels; 0 if their product differs, None if there was no time."""

    def multiply(rows: Tensor, panels: Tensor) -> Tensor:
        return multiplied(layout, rows, panels, len(panels) * LANES, None)

    panels = [lay_out_panels(weight, layout) for weight in weights]
    if not _agrees(weights[0], panels[0], multiply):
        return 0.0
    return _mean_gain(weights, panels, multiply, deadline_s)


def _mean_gain(
    weights: Sequence[Tensor],
    laid_out: Sequence[Tensor],
    multiply: Multiply,
    deadline_s: float,
) -> float | None:
    """The geometric mean of the speedups for several numbers of rows; None if there was no time."""
    gains = []
    for num_rows in _TIMED_ROWS:
        if time.perf_counter() < deadline_s:
            rows = torch.ones(num_rows, weights[0].shape[1], dtype=weights[0].dtype)
            gains.append(measured_gain(rows, weights, laid_out, multiply, time.perf_counter))
    return math.prod(gains) ** (1 / len(gains)) if gains else None


def measured_gain(
    rows: Tensor,
    weights: Sequence[Tensor],
    laid_out: Sequence[Tensor],
    multiply: Multiply,
    clock: Callable[[], float],
) -> float:
    """How many times as fast as `nn.Linear` another way is.

    Both ways are timed in turns, so that other load disturbs both alike, and the best time of each counts.

    Args:
        rows: `[R, in]`.
        weights: plain weights `[out, in]` of several layers.
        laid_out: the same weights `[out, in]`, laid out for `multiply`.
        multiply: the other way.
        clock: returns seconds.
    """
    best_plain_s = best_other_s = math.inf
    for repetition in range(_MAX_REPETITIONS):
        weight, other = weights[repetition % len(weights)], laid_out[-1 - repetition % len(laid_out)]
        started_s = clock()
        functional.linear(rows, weight)
        between_s = clock()
        multiply(rows, other)
        best_plain_s = min(best_plain_s, between_s - started_s)
        best_other_s = min(best_other_s, clock() - between_s)
        is_clear = max(best_plain_s, best_other_s) > _CLEAR_GAIN * min(best_plain_s, best_other_s)
        if is_clear and repetition >= _MIN_REPETITIONS:
            break
    return best_plain_s / best_other_s


def _agrees(weight: Tensor, laid_out: Tensor, multiply: Multiply) -> bool:
    """Whether a product equals that of `nn.Linear` up to rounding in the weights' dtype.

    The environment variable `ONEDNN_DEFAULT_FPMATH_MODE` can make oneDNN round more coarsely.
    """
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    product = multiply(rows, laid_out)[:, : len(weight)].float()
    difference = (product - functional.linear(rows, weight).float()).abs()
    # The sums go piece by piece, since the magnitudes of all weights would take as much memory as the weights.
    sizes = [functional.linear(rows.abs(), piece.abs()).float() for piece in torch.split(weight, _ROWS_OF_PIECE)]
    rounding = torch.finfo(weight.dtype).eps * torch.cat(sizes, dim=1)
    return bool((difference <= _MAX_ROUNDINGS * rounding).all())
