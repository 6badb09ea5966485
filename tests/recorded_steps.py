"""What CUDA graphs do, done on a CPU: operators are recorded with the tensors that they used, and run again on them.

A replay runs no Python of the step. Every tensor stays where it was; numbers that Python saw, or made, while the step
was recorded stay what they were then. So a step that depends on anything but its buffers comes out wrong, as it would
on a device; and what a capture does not allow is refused, as a device refuses it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# They wait for the device, or copy from memory that the device cannot see.
_NOT_CAPTURABLE = (
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.item, _aten.lift, _aten.lift_fresh, _aten.nonzero,
)  # fmt: skip


def record(step: Callable[[], None]) -> Callable[[], None]:
    """A `Record` of operators."""
    step()
    recorder = Recorder()
    with recorder:
        step()
    return recorder.replay


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators while it is entered.

    Attributes:
        is_paused: whether operators run without being recorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_paused = False
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused and func.overloadpacket in _NOT_CAPTURABLE:
            raise RuntimeError(f"{func} is not permitted when a stream is capturing")
        output = func(*args, **(kwargs or {}))
        if not self.is_paused:
            self._calls.append((func, args, kwargs or {}, output))
        return output

    def add(self, func: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records a call that torch does not dispatch, such as a launch; it returns nothing."""
        self._calls.append((func, args, kwargs, None))

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, output in self._calls:
            known = {_address(tensor) for tensor in _tensors((args, kwargs))}
            for old, new in zip(_tensors(output), _tensors(func(*args, **kwargs)), strict=True):
                # Views, and what an operator changed in place, are where they belong already.
                if _address(old) not in known:
                    old.copy_(new)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
