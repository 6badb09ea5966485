"""Decode steps that were recorded once, and are replayed.

Launched one by one from Python, the kernels of a small step can take longer to launch than to run. A recorded step is
launched as one. It repeats the same kernels on the same addresses, so each size of a batch is recorded by itself, and
rows that no session has are padding (as in vLLM and TensorRT-LLM).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from corolla.compute.attention.batch import AttentionBackend, PackedRow
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.models.fused import FusedSpan

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a recorded step. With so few, a GPU should wait for the weights, whatever padding there is to multiply."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a step does to tensors, and returns what does the same again, whatever they hold by then.

The step computes with tensors only. It is run at least once before it is recorded, to make what it keeps. RuntimeError
says that it does what cannot be recorded.
"""


# Libraries choose kernels and take workspaces in their first calls, which a capture does not allow.
_WARM_UP_STEPS: Final = 3


class CudaCapture:
    """Records steps as CUDA graphs, in the order that torch's notes on them ask for.

    The recordings share one memory pool: they run one after another, and nothing in it outlives a step.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Record`."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_STEPS):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # What other threads of the process do meanwhile is no part of the step.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                step()
        return graph.replay


class DecodeGraphs:
    """Recorded steps of all layers of a span, one for each size.

    Args:
        fused: the span's blocks.
        num_layers: of the span.
        buffers: with room for the rows of the largest size.
        backend: of attention; it may look at nothing but what the batch has prepared.
        record: see `Record`.
        sizes: rows of the steps.

    Attributes:
        buffers: what the recorded steps read and write.
        num_replays: how many steps ran so.

    Raises:
        RuntimeError: the step cannot be recorded.
    """

    def __init__(
        self,
        fused: FusedSpan,
        num_layers: int,
        buffers: DecodeBuffers,
        backend: AttentionBackend,
        record: Record,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        self.num_replays = 0
        self._fused = fused
        self._layers = range(num_layers)
        self.buffers = buffers
        self._backend = backend
        # What the first step makes, and others read, is not to lie in memory that belongs to a recording.
        self._step(max(sizes))
        # The largest first: the others then find room in its memory.
        self._replays = {size: record(partial(self._step, size)) for size in sorted(sizes, reverse=True)}
        self._sizes = sorted(sizes)
        # Its address is in the recordings, and the blocks may come to read another one for longer texts.
        self._kept = fused.rotary_table

    def size_for(self, rows: Sequence[PackedRow]) -> int | None:
        """Of the smallest recorded step that has room for these rows; None where there is none."""
        if len(rows) > self._sizes[-1] or not self.buffers.fit(rows):
            return None
        return next(size for size in self._sizes if size >= len(rows))

    def replay(self, rows: Sequence[PackedRow], hidden: Tensor, size: int) -> Tensor:
        """Runs all layers over one new token of each row, and stores their keys and values.

        Args:
            rows: whose pages may be written.
            hidden: `[rows, H]`.
            size: see `size_for`.

        Returns:
            `[rows, H]`, the caller's own.
        """
        self.buffers.write(rows, hidden, size)
        self._replays[size]()
        self.num_replays += 1
        return self.buffers.output[: len(rows)].clone()

    def _step(self, size: int) -> None:
        buffers = self.buffers
        batch = buffers.batch(size, self._backend)
        output = self._fused.forward(
            buffers.hidden[:size], buffers.positions[:size], buffers.max_tokens, self._layers, batch.attend
        )
        buffers.output[:size].copy_(output)
