"""A kernel is used only if it is near what it should compute, and gives the same bits in every cut."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from corolla.kernels.kernel_trial import KernelTrial, are_same, relative_error, try_kernel

ROWS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
BATCH = "a row's bits depend on the batch"


def tried(factor: float = 1.0, wrong: tuple[int, ...] = (), may_differ: tuple[int, ...] = ()) -> KernelTrial[int]:
    """The trial of a kernel that doubles rows, in calls of 6, 4 and 1 rows, of which `wrong` have another number."""

    def run(cut: int) -> Iterator[Tensor]:
        for part in torch.split(ROWS, cut):
            output = 2 * factor * part
            if cut in wrong:
                output[-1, -1] = torch.nextafter(output[-1, -1], torch.tensor(torch.inf))
            yield output

    return try_kernel(run, (6, 4, 1), lambda found: relative_error(found, 2 * ROWS), 1e-5, may_differ)


def test_a_kernel_that_is_right_in_every_cut_holds() -> None:
    assert tried() == KernelTrial(None)


@pytest.mark.parametrize("wrong", [(4,), (1,), (4, 1)])
def test_one_number_of_one_cut_is_enough_to_fail(wrong: tuple[int, ...]) -> None:
    assert tried(wrong=wrong).failure == BATCH


def test_cuts_that_may_differ_are_named() -> None:
    assert tried(wrong=(4,), may_differ=(4,)) == KernelTrial(None, frozenset({4}))
    assert tried(wrong=(4, 1), may_differ=(4,)).failure == BATCH


@pytest.mark.parametrize("factor, failure", [(1.001, "1.0e-03"), (float("nan"), "nan")])
def test_a_kernel_that_is_far_from_its_definition_fails(factor: float, failure: str) -> None:
    assert tried(factor).failure == f"its results differ by {failure}"


def test_what_a_compiler_raises_is_a_failure() -> None:
    def run(_cut: int) -> Iterator[Tensor]:
        raise NotImplementedError("no such instruction\nmore lines")

    assert try_kernel(run, (1,), lambda _found: 0.0, 0.0).failure == "NotImplementedError: no such instruction"


def test_signs_of_zero_are_bits() -> None:
    assert not are_same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not are_same(torch.zeros(2), torch.zeros(3))
    assert are_same(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
