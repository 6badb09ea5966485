"""One product of 1 and 8 rows by layouts of packed weights, on a GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.figures import Figure, Spread, failure, figure
from corolla.kernels.layouts import LAYOUTS, Layout, Number, Scale, group_layout
from corolla.models.cuda_capture import CudaCapture

Operand = TypeVar("Operand")

# Outputs and inputs of products of Llama 3.1 8B: queries, keys and values; output; gate and up; down.
SHAPES: Final = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_TINY_SHAPES: Final = ((64, 512),)
# Weights of so many bytes are read in turn, several times what a GPU's caches hold.
_COLD_BYTES: Final = 512 << 20
_LEAST_LAUNCHES: Final = 20
_PART_BYTE: Final = 0x11
_NUM_ROWS: Final = (1, 8)


def products(
    device: str, dtype: torch.dtype, rounds: int, bandwidth: float, *, in_four_bits: bool = False
) -> Iterator[Figure]:
    """Microseconds of a product, for each shape: plain weights first, then each layout.

    Args:
        device: a CUDA device; a CPU rehearses with Triton's interpreter, whose products have no fixed order.
        dtype: the dtype of rows and plain weights.
        rounds: how often each product is timed.
        bandwidth: bytes per second that the memory gives.
        in_four_bits: whether only Q4_0 and groups of 128 numbers are measured.
    """
    layouts = [LAYOUTS["Q4_0"], *_groups()[1:3]] if in_four_bits else [*LAYOUTS.values(), *_groups()]
    from corolla.kernels.triton.launches import multiply

    for num_outputs, num_inputs in SHAPES if device.startswith("cuda") else _TINY_SHAPES:
        shape = f"{num_outputs}x{num_inputs}"
        rows = torch.randn(max(_NUM_ROWS), num_inputs, device=device).to(dtype)
        weights = [torch.randn(num_outputs, num_inputs, device=device).to(dtype) / 64]
        weights += [weights[0].clone() for _ in range(_copies(weights[0], device) - 1)]
        name = str(dtype).removeprefix("torch.")
        yield figure(f"{shape}, {name}, the memory allows", "us", [weights[0].nbytes / bandwidth * 1e6])
        for count in _NUM_ROWS:
            plain: dict[str, Callable[[Tensor], Tensor]] = {
                "torch": partial(functional.linear, rows[:count]),
                "triton": partial(multiply, rows[:count]),
            }
            for way, product in plain.items():
                found = _microseconds(product, weights, rounds)
                yield figure(f"{shape}, rows {count}, {name} by {way}", "us", found)
        del weights
        for layout in filter(None, layouts):
            try:
                yield from _of_layout(layout, shape, rows, num_outputs, rounds, bandwidth)
            except Exception as error:
                yield failure(f"{shape}, {layout.name}", error)


def _groups() -> list[Layout | None]:
    scale = Scale.BFLOAT16
    return [
        group_layout(128, Scale.FLOAT16), group_layout(128, Scale.FLOAT16, has_zeros=True), group_layout(128, scale),
        group_layout(32, scale, has_minimum=True), group_layout(4096, Scale.FLOAT32, number=Number.INT8),
        group_layout(128, Scale.FLOAT32, number=Number.E4M3),
    ]  # fmt: skip


def _of_layout(
    layout: Layout, shape: str, rows: Tensor, num_outputs: int, rounds: int, bandwidth: float
) -> Iterator[Figure]:
    from corolla.kernels.triton.launches import multiply
    from corolla.kernels.triton.packed_launches import PanelViews, expand_packed, multiply_packed

    device = str(rows.device)
    panels = _drawn_panels(layout, num_outputs, rows.shape[1]).to(device)
    views = [PanelViews.from_panels(panels, layout)]
    views += [PanelViews.from_panels(panels.clone(), layout) for _ in range(_copies(panels, device) - 1)]
    yield figure(f"{shape}, {layout.name}, the memory allows", "us", [panels.nbytes / bandwidth * 1e6])
    expanded = multiply(rows, expand_packed(layout, torch.arange(num_outputs, device=device), panels, rows.dtype))

    def multiplied(count: int, of: PanelViews) -> Tensor:
        return multiply_packed(layout, rows[:count], of, num_outputs)

    for count in _NUM_ROWS:
        name, product = f"{shape}, rows {count}, {layout.name}", partial(multiplied, count)
        yield figure(name, "us", _microseconds(product, views, rounds))
        if not torch.equal(product(views[0]), expanded[:count]):
            yield Figure(f"{name}: bits", "", Spread(0, 0, 0), error="they differ from those of expanded weights")


def _drawn_panels(layout: Layout, num_outputs: int, num_inputs: int) -> Tensor:
    shape = (num_outputs // 16, num_inputs // layout.block_weights, layout.block_bytes)
    panels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # Scales, minima and zero points of such bytes are small numbers.
    panels[:, :, : layout.low_at] = _PART_BYTE
    return panels


def _copies(tensor: Tensor, device: str) -> int:
    return max(1, _COLD_BYTES // tensor.nbytes) if device.startswith("cuda") else 1


def _microseconds(product: Callable[[Operand], Tensor], operands: Sequence[Operand], rounds: int) -> list[float]:
    """The time of a product in each round; on a GPU without that of launches, which a graph makes."""
    if not torch.cuda.is_available():
        started_s = time.perf_counter()
        product(operands[0])
        return [(time.perf_counter() - started_s) * 1e6]
    product(operands[0])
    turns = -(-_LEAST_LAUNCHES // len(operands))

    def multiply_all() -> None:
        for operand in [*operands] * turns:
            product(operand)

    replay = CudaCapture(torch.device("cuda", torch.cuda.current_device()))(multiply_all, multiply_all)
    found = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / (turns * len(operands)))
    return found[1:]
