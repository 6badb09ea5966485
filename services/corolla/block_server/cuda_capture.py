"""Records steps as CUDA graphs. All else about recorded steps knows nothing of CUDA."""

from collections.abc import Callable
from typing import Final

import torch

# Libraries choose kernels and take workspaces in their first calls, which a capture does not allow.
_WARM_UP_STEPS: Final = 3


class CudaCapture:
    """Records steps on one device, in the order that torch's notes on CUDA graphs ask for.

    The recordings share one memory pool: they run one after another, and nothing in it outlives a step.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `decode_graphs.Record`."""
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
