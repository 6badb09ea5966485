"""Products as a GPU's tensor cores compute them: the inner dimension in one order, for every number of rows.

The interpreter multiplies by numpy, whose library chooses an order by the size of the tile. On an H100 a row of a
product has the same bits for every tile height; the interpreter keeps that rule with these products, so it shows
whether a kernel keeps it, too.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton.language as tl
from triton.runtime import interpreter

from corolla.kernels.triton import device_code
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

    A GPU does so by itself. The interpreter also leaves out most of what only takes time.
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

    prepare, prepared = interpreter._patch_lang, dict[str, Any]()

    def prepare_once(function: Any) -> Any:
        """The interpreter would replace Triton's language anew in each call of a function, also within kernels."""
        if function.__module__ not in prepared:
            prepare(function)
        return prepared.setdefault(function.__module__, SimpleNamespace(restore=lambda: None))

    patch.setattr(interpreter, "_patch_lang", prepare_once)
    # It would compute whether numbers overflow, and drop the result.
    builder = interpreter.interpreter_builder
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    # What is merged together takes its time for pages that are not there, too.
    patch.setattr(device_code, "MERGED_AT_ONCE", tl.constexpr(2))
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
