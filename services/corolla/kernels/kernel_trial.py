"""Tries a kernel before a server uses it: near what it should compute, and the same bits in every cut and mixture.

Other code takes the place of a kernel that fails, so nothing that a compiler raises ends a start. All tensors of a
trial are on one device, and the outputs of a kernel have one dtype.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

Cut = TypeVar("Cut")

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class KernelTrial(Generic[Cut]):
    """What a trial has found.

    Attributes:
        failure: what failed, as a sentence's end; None: the kernel holds.
        differing: the cuts that may give other bits, and do.
    """

    failure: str | None
    differing: frozenset[Cut] = frozenset()


@torch.inference_mode()
def try_kernel(
    run: Callable[[Cut], Iterable[Tensor]],
    cuts: Iterable[Cut],
    error_of: Callable[[Tensor], float],
    tolerance: float,
    may_differ: Collection[Cut] = (),
) -> KernelTrial[Cut]:
    """Runs a kernel on one input, cut in several ways. The trial ends with the first failure.

    Args:
        run: yields the outputs of all rows of the input, or of the first ones, in their order, part after part:
            `[rows of the part, ...]`.
        cuts: the ways to cut the input; the first one gives the outputs of all rows, with which others are compared.
        error_of: the error of these outputs, `[rows, ...]`.
        tolerance: the largest error allowed; NaN is larger.
        may_differ: cuts in which rows may have other bits.
    """
    differing: set[Cut] = set()

    def failed() -> str | None:
        first, *others = cuts
        whole = torch.cat(list(run(first)))
        for cut in others:
            begin = 0
            for part in run(cut):
                if not are_same(part, whole[begin : begin + len(part)]):
                    differing.add(cut)
                    break
                begin += len(part)
            if not differing <= set(may_differ):
                return "a row's bits depend on the batch"
        return too_far(error_of(whole), tolerance)

    return KernelTrial(failure_of(failed), frozenset(differing))


def failure_of(trial: Callable[[], str | None]) -> str | None:
    """Returns what a trial returns, or what it raises, as a sentence's end.

    Raises:
        AcceleratorError: the device failed.
    """
    try:
        return trial()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        # Compilers raise errors of many kinds.
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """The class of an error, and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def too_far(error: float, tolerance: float) -> str | None:
    """Returns None for an error up to the tolerance, or a sentence's end; NaN is above it."""
    return None if error <= tolerance else f"its results differ by {error:.1e}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of `found`, `[rows, ...]`, from `expected`, as a part of the largest number expected."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def are_same(one: Tensor, other: Tensor) -> bool:
    """`one` and `other`, `[rows, ...]` each, have the same shape and bits."""
    integers = _INTEGERS[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))
