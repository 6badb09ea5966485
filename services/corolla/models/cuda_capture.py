"""Records work of a GPU once as a CUDA graph, so that it is launched as a whole from then on."""

from collections.abc import Callable

import torch

Record = Callable[[Callable[[], None], Callable[[], None]], Callable[[], None]]
"""Records the tensor operations of a step. Returns a function that runs them again on the tensors' current contents.

Its first argument is the step, which computes with tensors only. Its second one runs each kind of work of the step at
least once, and is called before the step is recorded: no capture may load a kernel, or let a library take a workspace.
RuntimeError is raised if the step does something that cannot be recorded.
"""


class CudaCapture:
    """Records steps as CUDA graphs, as torch's notes on CUDA graphs describe (warm-up on a side stream, then capture).

    One warm-up is enough: more of them serve autograd, and libraries that try several kernels, and steps have neither.

    The recordings share one memory pool: they run one after another, and nothing in the pool outlives a step. Once one
    of them is given up, record all others anew with another object: torch refuses a pool that no graph uses any more.

    Warm-up and capture have one stream. cuBLAS keeps a workspace for each stream, 32 MiB on an H100: with streams of
    their own, each recording would take another one, and the first one would lie in the pool.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
        """See `Record`."""
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        # This context gives the caller its stream back even if the capture fails; that of the capture would not.
        with torch.cuda.stream(self._stream):
            warm_up()
            graph = torch.cuda.CUDAGraph()
            # The capture ignores the work of other threads of the process.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        caller.wait_stream(self._stream)
        return graph.replay
