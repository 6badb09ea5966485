"""The interface of formats of packed weights; each format has a module next to this one."""

import abc
from collections.abc import Collection, Mapping
from typing import ClassVar

from torch import Tensor

from corolla.kernels.layouts import Layout
from corolla.kernels.repacking import Numbers
from corolla.models.quantized.description import Quantization, Scheme
from corolla.models.quantized.stored_tensors import StoredTensors, Unfit


class Format(abc.ABC):
    """A format of packed weights. Kernels can multiply by weights of some formats without expanding them.

    Attributes:
        endings: maps the ending of a part's name to the ending that the weight's own name has instead.
        step: rows are expanded in ranges whose bounds are multiples of this, except for the end of the last range.
    """

    endings: ClassVar[Mapping[str, str]]
    step: ClassVar[int] = 1

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization

    @property
    def _schemes(self) -> tuple[Scheme, ...]:
        return self._quantization.schemes

    @abc.abstractmethod
    def shape(self, stored: StoredTensors) -> tuple[int, ...]:
        """The shape of the weight that the parts hold, mostly `[out, in]`. Reads only parts of a few bytes.

        Raises:
            Unfit: the parts do not fit each other.
        """

    @abc.abstractmethod
    def rows(self, tensors: Mapping[str, Tensor], start: int, end: int) -> Tensor:
        """The weight's entries `[start, end)` of its first dimension, in new memory.

        `shape` has accepted the tensors before.

        Args:
            tensors: the weight's tensors by role, on the CPU, with the dtypes and shapes of the format's own docstring.

        Returns:
            float32 `[end - start, ...]` on the CPU, with the other dimensions of `shape`.
        """

    def likely_layout(self, roles: Collection[str], num_inputs: int) -> Layout:
        """The layout of a weight, judged only by the names of its parts. Raises Unfit where it cannot stay packed."""
        raise Unfit("has a format that no kernel can multiply")

    def layout(self, stored: StoredTensors) -> Layout:
        """The layout in memory of a weight that stays packed.

        `shape` has accepted the tensors before.

        Raises:
            Unfit: the weight has to be expanded; the message says why.
        """
        raise Unfit("has a format that no kernel can multiply")

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many rows and columns the panels of a weight of this shape have."""
        num_rows, num_columns = shape
        return num_rows, num_columns

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The input of each column of the packed weight, int32 `[in]`; None where columns are in the inputs' order.

        Args:
            tensors: the weight's tensors by role, on the CPU, with the dtypes and shapes of the format's own docstring.
        """
        return None

    def numbers(
        self, tensors: Mapping[str, Tensor], start: int, end: int, layout: Layout, order: Tensor | None
    ) -> Numbers:
        """The numbers of the rows `[start, end)` of a weight with a layout, with columns in the given order.

        Args:
            tensors: the weight's tensors by role, on one device, with the dtypes and shapes of the format's docstring.
            start: a multiple of 16.
            layout: the result of the method `layout`.
            order: the result of the method `order`, int32 `[in]` on the same device, or None.
        """
        raise NotImplementedError
