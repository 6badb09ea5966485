"""What CUDA graphs do, done on a CPU: operators are recorded with the tensors that they used, and run again on them.

A replay runs no Python of the step. Every tensor stays where it was; numbers that Python saw, or made, while the step
was recorded stay what they were then. So a step that depends on anything but its buffers comes out wrong, as it would
on a device; and what a capture does not allow is refused, as a device refuses it. On a CPU nothing else would tell that
a tensor is made on the wrong device, or kept after the recording, whose next replay overwrites it.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# They wait for the device, copy from memory that the device cannot see, or draw the same random numbers in each replay.
_NOT_CAPTURABLE = (
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.item, _aten.lift, _aten.lift_fresh, _aten.nonzero,
    _aten.bernoulli, _aten.multinomial, _aten.normal_, _aten.random_, _aten.uniform_, _aten.unique_dim,
)  # fmt: skip
# They make their tensors on the CPU unless they are given a device.
_MAKING = (
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn, torch.zeros,
)  # fmt: skip
_GOING_TO_THE_HOST = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)


def record(step: Callable[[], None], warm_up: Callable[[], None]) -> Callable[[], None]:
    """A `Record` of operators."""
    warm_up()
    run_without_keeping(step)
    recorder = Recorder()
    with PlacesOfTensors(recorder), recorder:
        step()
    return recorder.replay


def run_without_keeping(step: Callable[[], None]) -> None:
    """Runs a step. Raises RuntimeError if a tensor that it made lasts longer: a recording would overwrite it."""
    made = MadeTensors()
    with made:
        step()
    gc.collect()
    kept = [tensor for each in made.references if (tensor := each()) is not None]
    if kept:
        raise RuntimeError(f"a tensor {tuple(kept[0].shape)} of {kept[0].dtype} of a recorded step is kept")


class MadeTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operators make, and does not keep them.

    Attributes:
        references: these tensors.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.references: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = set(map(id, _tensors((args, kwargs))))
        self.references += [weakref.ref(tensor) for tensor in _tensors(output) if id(tensor) not in given]
        return output


class PlacesOfTensors(TorchFunctionMode):
    """Refuses calls by which a step on a GPU would make tensors on the CPU, or bring numbers there."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_wrong = func in _GOING_TO_THE_HOST or (func in _MAKING and not (kwargs or {}).get("device"))
        if is_wrong and not self._recorder.is_paused:
            raise RuntimeError(f"{func.__name__} is not permitted when a stream is capturing")
        return func(*args, **(kwargs or {}))


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
