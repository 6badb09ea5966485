"""Linear layers that multiply in the way that the rule of `product_rule` has for this machine.

The plain way is torch's function for `nn.Linear`. It takes weights in any layout, and on CPUs it does not profit from
using the same weights again. Two other ways do: compiled functions multiply by panels (see `kernels/layouts`), and
oneDNN by a copy in its own layout. They are up to three times as fast, from a single row to a long prompt, but not for
every dtype, shape and machine. Where another way is taken, the plain weights are freed. Plain weights have the model's
dtype, and panels are uint8. Weights, panels and oneDNN's copies are on the CPU.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from corolla.chassis import heap
from corolla.kernels.layouts import PlainLayout
from corolla.kernels.products import multiplied, plain_layout
from corolla.kernels.repacking import empty_matrices
from corolla.kernels.repacking import lay_out as lay_out_panels
from corolla.models.invariant import InvariantProduct, Product, choose_invariant_product
from corolla.models.product_rule import AUTO, MAX_COPIED_BYTES, Processor, Way, way_of

log = logging.getLogger(__name__)

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# At most this share of a model takes memory twice while weights are laid out, or `MIN_WHOLE_BYTES` if that is more.
_MAX_WHOLE_SHARE: Final = 0.2
_MAX_WHOLE_BYTES: Final = 1 << 28
MIN_WHOLE_BYTES: Final = 8 << 20
# A layer that alone exceeds that limit, such as a model's head, is laid out in at most `_MAX_PIECES` runs of its
# outputs. The length of each run but the last is a multiple of `_OUTPUTS_OF_LAYOUT`.
_MAX_PIECES: Final = 8
_OUTPUTS_OF_LAYOUT: Final = 64
# oneDNN's layout is the same for all small numbers of rows, and is good for larger ones.
_ROWS_OF_LAYOUT: Final = 16
_MAX_ROUNDINGS: Final = 16


class DenseLinear(nn.Module):
    """Computes `x W^T + b` as `nn.Linear` does, with dense weights: on a CPU in one of three ways, on a GPU by a rule.

    The rule of GPUs is that no row of a product depends on the other rows of the call; see `kernels/product_choice`.

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
            return Way.PANELS
        return Way.ONEDNN if self.relaid else Way.LIBRARY

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
    """A module is plain if it is torch's own linear layer; quantised layers must not be changed."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def ways_by_shape(layers: Iterable[DenseLinear]) -> dict[str, str]:
    """How layers multiply, by the shape of their weights, such as `4096x14336` (outputs, inputs).

    Where layers of one shape multiply in different ways, the names of these ways are joined by `+`.
    """
    ways: defaultdict[str, set[str]] = defaultdict(set)
    for layer in layers:
        num_outputs, num_inputs = layer.weight.shape
        ways[f"{num_outputs}x{num_inputs}"].add(layer.way)
    return {shape: "+".join(sorted(names)) for shape, names in ways.items()}


def replace_linears(root: nn.Module, kept: Collection[str] = ()) -> list[DenseLinear]:
    """Replaces every plain linear layer below `root` by a DenseLinear with the same parameters; returns the new layers.

    Args:
        kept: names, within their blocks, of layers that are not replaced, since other code reads their weights.
    """
    replaced: list[DenseLinear] = []
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child) and name not in kept:
                replaced.append(DenseLinear(cast(nn.Parameter, child.weight), cast(nn.Parameter | None, child.bias)))
                setattr(parent, name, replaced[-1])
    return replaced


@functools.cache
def this_processor() -> Processor:
    """What the rule asks of this machine's CPU."""
    can = torch.cpu.get_capabilities()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    onednn = {
        torch.float32: has_onednn,
        torch.bfloat16: has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: has_onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    matrices = {torch.bfloat16: can.get("amx_bf16"), torch.float16: can.get("amx_fp16")}
    layouts = {dtype: layout for dtype in _TYPES if (layout := plain_layout(dtype)) is not None}
    return Processor(
        panels={_name(dtype): layout.block_weights for dtype, layout in layouts.items()},
        onednn=frozenset(_name(dtype) for dtype, has_kernel in onednn.items() if has_kernel),
        matrices=frozenset(_name(dtype) for dtype, has_them in matrices.items() if has_them),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def choose_products(layers: Iterable[DenseLinear], *, shared: Collection[Tensor] = (), asked_for: str = AUTO) -> None:
    """Lays the weights of layers out for the way that the rule has for them; where its product differs, they stay.

    On a GPU it chooses products by another rule instead, see `make_invariant`.

    Args:
        layers: layers on one device.
        shared: weights `[out, in]` that other code reads, too. They are not changed, and large ones are not copied
            either. All other weights belong to the layers alone.
        asked_for: see `way_of`.
    """
    held = {id(weight) for weight in shared}
    layers = list(layers)
    make_invariant(layer for layer in layers if layer.weight.device.type == "cuda")
    share = int(_MAX_WHOLE_SHARE * sum(layer.weight.nbytes for layer in layers))
    max_bytes = min(_MAX_WHOLE_BYTES, max(MIN_WHOLE_BYTES, share))
    alike: defaultdict[tuple[Any, ...], list[DenseLinear]] = defaultdict(list)
    for layer in layers:
        if layer.weight.device.type == "cpu" and layer.weight.dtype in _TYPES:
            alike[layer.weight.dtype, layer.weight.shape, id(layer.weight) in held].append(layer)
    for (dtype, shape, is_held), group in alike.items():
        num_bytes = group[0].weight.nbytes
        way = way_of(this_processor(), _name(dtype), tuple(shape), num_bytes, is_shared=is_held, asked_for=asked_for)
        if way is Way.LIBRARY or not _holds(group[0], way):
            continue
        if way is Way.PANELS:
            _use_panels(group, max_bytes)
        else:
            _use_onednn(group, is_held, max_bytes)


# The order of a library's sums depends on the shape of weights, not on their numbers.
_CHOSEN: Final[dict[tuple[Any, ...], InvariantProduct | None]] = {}


def make_invariant(layers: Iterable[DenseLinear], products: Mapping[str, Product] | None = None) -> None:
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


def _use_panels(layers: Sequence[DenseLinear], max_bytes: int) -> None:
    layout, (num_outputs, num_inputs) = layers[0].layout, layers[0].weight.shape
    if layout is None:
        return
    leave = _discard if layers[0].weight.nbytes > max_bytes else None
    for layer, room in zip(layers, empty_matrices(len(layers), num_outputs, num_inputs, layout), strict=True):
        layer.use_panels(lay_out_panels(layer.weight, layout, room, leave))


def _use_onednn(layers: Sequence[DenseLinear], is_held: bool, max_bytes: int) -> None:
    for layer in layers:
        if is_held:
            layer.use(layer.weight if layer.weight.nbytes > MAX_COPIED_BYTES else relay(layer.weight))
            continue
        pieces, relaid = _pieces(layer.weight, max_bytes), []
        for piece in pieces:
            relaid.append(relay(piece))
            if len(pieces) > 1:
                _discard(piece)
        layer.use(*relaid)


def _pieces(weight: Tensor, max_bytes: int) -> tuple[Tensor, ...]:
    """A weight, in several runs of rows if it is large: a run takes memory twice while it is laid out."""
    if weight.nbytes <= max_bytes:
        return (weight,)
    num_rows = -(-weight.shape[0] // _MAX_PIECES)
    return torch.split(weight.detach(), -(-num_rows // _OUTPUTS_OF_LAYOUT) * _OUTPUTS_OF_LAYOUT)


def _discard(part: Tensor) -> None:
    heap.discard(part.data_ptr(), part.nbytes)


def _holds(layer: DenseLinear, way: Way) -> bool:
    """There is a kernel for a way, and its product equals that of `nn.Linear` up to rounding.

    The environment variable `ONEDNN_DEFAULT_FPMATH_MODE` can make oneDNN round more coarsely.
    """
    weight = layer.weight[:_OUTPUTS_OF_LAYOUT]
    rows = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        if way is Way.PANELS and layer.layout is not None:
            product = multiplied(layer.layout, rows, lay_out_panels(weight, layer.layout), len(weight), None)
        else:
            product = multiply_relaid(rows, relay(weight))
    except (RuntimeError, AttributeError):
        return False  # no kernel for this type on this machine
    difference = (product.float() - functional.linear(rows, weight).float()).abs()
    rounding = torch.finfo(weight.dtype).eps * functional.linear(rows.abs(), weight.abs()).float()
    return bool((difference <= _MAX_ROUNDINGS * rounding).all())
