"""The names of weight formats in settings and commands."""

from collections.abc import Sequence
from typing import Final, Literal

from corolla.chassis.processors import is_cpu

DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4", "packed"]
PACKED: Final = "packed"
"""The quantization that keeps the weights as the checkpoint's files have them."""
KVCacheDtypeName = Literal["auto", "fp8", "int8"]
DTYPE_ABBREVIATIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def default_dtype(device: str) -> DtypeName:
    """Returns the dtype with which a device of this torch name computes unless a setting says otherwise.

    GPUs compute float32 row by row and without recorded steps, since their fast kernels need half precision.
    """
    return "float32" if is_cpu(device) else "bfloat16"


def full_dtype_name(name: str) -> str:
    """Returns the full name of an abbreviation, such as `float32` for `fp32`; returns any other name unchanged."""
    return DTYPE_ABBREVIATIONS.get(name, name)


def tokens_follow_numerics(dtype: str, kv_cache_dtype: str) -> bool:
    """Servers that compute in different ways may choose different tokens.

    In float32 they choose the same ones, unless keys and values are rounded to eight bits.

    Args:
        dtype: The full name of the dtype.
        kv_cache_dtype: The name of the format of keys and values.
    """
    return dtype != "float32" or kv_cache_dtype != "auto"


def weight_format(dtype: str, quantization: str, packed: Sequence[str] = (), expanded: Sequence[str] = ()) -> str:
    """Returns a format's name for people, such as `float32`, `int4/bf16`, or `packed/fp32: Q4_K, Q3_K expanded`.

    Args:
        dtype: The full name of the dtype.
        quantization: The name of the quantization.
        packed: The checkpoint's weight formats that are multiplied without expanding them first.
        expanded: The checkpoint's weight formats that are expanded.
    """
    short = {full: abbreviation for abbreviation, full in DTYPE_ABBREVIATIONS.items()}
    name = dtype if quantization == "none" else f"{quantization}/{short.get(dtype, dtype)}"
    formats = [*packed, *(f"{each} expanded" for each in expanded)]
    return f"{name}: {', '.join(formats)}" if formats else name
