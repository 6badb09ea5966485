"""Products as a GPU's tensor cores compute them: the inner dimension in one order, for every number of rows.

The interpreter multiplies by numpy, whose library chooses an order by the size of the tile. On an H100 a row of a
product has the same bits for every tile height; the interpreter keeps that rule with these products, so it shows
whether a kernel keeps it, too.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from triton.runtime import interpreter

from tests.triton_kernels import DEVICE

Numbers = npt.NDArray[Any]


def ordered_product(left: Numbers, right: Numbers, start: Numbers) -> Numbers:
    """`left right + start`; each number adds its products one by one, from the first inner index to the last."""
    total = start.copy()
    for inner in range(left.shape[1]):
        total += left[:, inner, None].astype(total.dtype) * right[None, inner, :].astype(total.dtype)
    return total


def _floats(handle: Any) -> Numbers:
    """The numbers of a handle. The interpreter holds bfloat16 as the upper halves of float32."""
    if handle.dtype.scalar.name != "bf16":
        return np.asarray(handle.data)
    return np.asarray((handle.data.astype(np.uint32) << 16).view(np.float32))


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter multiply in one order, and round a fused multiply-add once, until `patch` is undone.

    A GPU does so by itself.
    """
    if DEVICE != "cpu":
        return

    def create_dot(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
        handle: Any = interpreter.TensorHandle
        return handle(ordered_product(_floats(a), _floats(b), d.data), d.dtype.scalar)

    def create_fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
        """A GPU rounds once; numpy's float32 would round the product, too."""
        handle: Any = interpreter.TensorHandle
        exact = x.data.astype(np.float64) * y.data + z.data
        return handle(exact.astype(z.data.dtype), z.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
