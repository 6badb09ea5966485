"""Linear layers that multiply a few rows as fast as the machine can.

Decoding multiplies big weights by one to a dozen rows, and is bound by reading the weights. Numeric libraries differ by
up to three times there, by shape and by machine, between computing `x W^T` and the same product as `(W x^T)^T`. So the
faster of the two is measured once, when a model is loaded, with the weights that will be used.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_TUNED_ROWS: Final = 16
_MIN_REPETITIONS: Final = 6
_MAX_REPETITIONS: Final = 24
# Timing more layers than the caches hold gives the cost of weights that come from memory, as they will.
_MAX_TIMED_LAYERS: Final = 32
# A tie goes to the library's own order: another one must earn its transposed output.
_MIN_GAIN: Final = 1.05
# A difference of this size ends the measurement early.
_CLEAR_GAIN: Final = 1.25


class TunedLinear(nn.Module):
    """`x W^T + b`, as `nn.Linear`, by the faster of two orders for each small number of rows.

    Attributes:
        weight: `[out, in]`, the very parameter of the layer that it replaces.
        bias: `[out]` or None.
        by_columns: whether so many rows, the index, are multiplied as `(W x^T)^T`; more rows never are.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.by_columns: tuple[bool, ...] = (False,) * (MAX_TUNED_ROWS + 1)

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies `[..., in]` to `[..., out]`; the result may be laid out column by column."""
        if rows.dim() != 2:
            return self.forward(rows.reshape(-1, rows.shape[-1])).reshape(*rows.shape[:-1], -1)
        num_rows = rows.shape[0]
        if num_rows > MAX_TUNED_ROWS or not self.by_columns[num_rows]:
            return functional.linear(rows, self.weight, self.bias)
        product = multiply_columns(self.weight, rows)
        return product if self.bias is None else product + self.bias


def multiply_columns(weight: Tensor, rows: Tensor) -> Tensor:
    """`rows W^T`, computed as `(W rows^T)^T`.

    Args:
        weight: `[out, in]`.
        rows: `[R, in]`.

    Returns:
        `[R, out]`; contiguous if R is 1, else a transposed view.
    """
    num_rows = rows.shape[0]
    if num_rows == 1:
        # One column would be a matrix-vector product, which is the slow case.
        return torch.mm(weight, torch.cat((rows, rows)).t())[:, 0].contiguous().unsqueeze(0)
    if num_rows % 2:
        rows = torch.cat((rows, rows[-1:]))
    # Rows that lie column by column, as this function returns them, would take the slowest way of all.
    return torch.mm(weight, rows.contiguous().t())[:, :num_rows].t()


def is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own linear layer with ordinary weights; quantised ones must be left as they are."""
    return type(module) is nn.Linear and type(module.weight.data) is Tensor


def replace_linears(root: nn.Module) -> list[TunedLinear]:
    """Puts a TunedLinear, with the same parameters, in place of every plain layer below `root`. Returns them."""
    replaced: list[TunedLinear] = []
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if is_plain(child):
                tuned = TunedLinear(cast(nn.Parameter, child.weight), cast(nn.Parameter | None, child.bias))
                setattr(parent, name, tuned)
                replaced.append(tuned)
    return replaced


@torch.inference_mode()
def tune(
    layers: Iterable[TunedLinear], *, budget_s: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Measures, for all layers of a shape together, which order each number of rows is multiplied in.

    Both orders are timed in turns, and the best time of each counts, so that a busy machine disturbs both alike.

    Args:
        layers: what is not plain float32 on a CPU is left alone.
        budget_s: when it is spent, what was not measured is multiplied as `nn.Linear` does; on a very busy machine no
            measurement would mean anything.
        clock: seconds.
    """
    deadline_s = clock() + budget_s
    by_shape: defaultdict[torch.Size, list[TunedLinear]] = defaultdict(list)
    for layer in layers:
        if _has_float32_on_cpu(layer):
            by_shape[layer.weight.shape].append(layer)
    choices = {shape: [False] * (MAX_TUNED_ROWS + 1) for shape in by_shape}
    # A single row first, for all shapes: it matters most.
    for num_rows in range(1, MAX_TUNED_ROWS + 1):
        for shape, group in by_shape.items():
            if clock() < deadline_s:
                weights = [layer.weight for layer in group[:_MAX_TIMED_LAYERS]]
                choices[shape][num_rows] = _columns_win(weights, num_rows, clock)
    for shape, group in by_shape.items():
        for layer in group:
            layer.by_columns = tuple(choices[shape])


def _has_float32_on_cpu(layer: TunedLinear) -> bool:
    """Narrower types, and other devices, have good kernels for few rows."""
    return layer.weight.dtype == torch.float32 and layer.weight.device.type == "cpu"


def _columns_win(weights: Sequence[Tensor], num_rows: int, clock: Callable[[], float]) -> bool:
    rows = torch.ones(num_rows, weights[0].shape[1])
    best_rows_s = best_columns_s = float("inf")
    for repetition in range(_MAX_REPETITIONS):
        weight, other = (weights[(2 * repetition + turn) % len(weights)] for turn in (0, 1))
        started = clock()
        functional.linear(rows, weight)
        between = clock()
        multiply_columns(other, rows)
        best_rows_s = min(best_rows_s, between - started)
        best_columns_s = min(best_columns_s, clock() - between)
        is_clear = max(best_rows_s, best_columns_s) > _CLEAR_GAIN * min(best_rows_s, best_columns_s)
        if is_clear and repetition >= _MIN_REPETITIONS:
            break
    return best_columns_s * _MIN_GAIN < best_rows_s
