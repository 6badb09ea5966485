"""What the ways to pack weights have in common; each has a module next to this one."""

import abc
from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Quantization, Scheme
from corolla.models.quantized.parts import Parts, Unfit


class Format(abc.ABC):
    """One way to pack weights. Kernels multiply by some as they are, where they have four bits.

    Attributes:
        endings: of the names of a weight's parts, and what stands for each in the weight's own name.
        step: rows are expanded from and up to multiples of it, the last one apart.
    """

    endings: ClassVar[Mapping[str, str]]
    step: ClassVar[int] = 1

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    @property
    def _schemes(self) -> tuple[Scheme, ...]:
        return self._quantization.schemes

    @abc.abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape of the weight that the parts hold, mostly `[out, in]`.

        Nothing is read but what a part of some bytes says of the others.

        Raises:
            Unfit: they hold none.
        """

    @abc.abstractmethod
    def rows(self, parts: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weight's entries `[start, end)` of its first dimension, float32, in memory of their own.

        The parts are those that `shape` found right.
        """

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        """That of a weight that was not read: what it has parts for. Raises Unfit."""
        raise Unfit("is of a format that has no kernel")

    def layout(self, parts: Parts) -> Layout:
        """How the weight lies in memory if it stays packed.

        The parts are those that `shape` found right.

        Raises:
            Unfit: it has to be expanded; the sentence says why.
        """
        raise Unfit("is of a format that has no kernel")

    def order(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """The input that each column of the packed weight takes, int32 `[in]`; None where the order is the same."""
        return None

    def numbers(
        self, parts: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        """The rows `[start, end)` of a weight with a layout: `start` is a multiple of 16, columns are in this order."""
        raise NotImplementedError
