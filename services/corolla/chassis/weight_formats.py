"""How settings and commands spell the weight formats that block servers run."""

from collections.abc import Sequence
from typing import Final, Literal

DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4", "packed"]
PACKED: Final = "packed"
"""As the files have the weights."""
KVCacheDtypeName = Literal["auto", "fp8", "int8"]
DTYPE_ABBREVIATIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype_name(name: str) -> str:
    """`float32` for `fp32`, and so on; anything else as it came."""
    return DTYPE_ABBREVIATIONS.get(name, name)


def weight_format(dtype: str, quantization: str, packed: Sequence[str] = (), expanded: Sequence[str] = ()) -> str:
    """For people: `float32`, `int4/bf16`, `packed/fp32: Q4_K, Q3_K expanded`, or `bfloat16: awq expanded`.

    Args:
        packed: formats of a checkpoint's weights that are multiplied as they are.
        expanded: formats that are not.
    """
    short = {full: abbreviation for abbreviation, full in DTYPE_ABBREVIATIONS.items()}
    name = dtype if quantization == "none" else f"{quantization}/{short.get(dtype, dtype)}"
    formats = [*packed, *(f"{each} expanded" for each in expanded)]
    return f"{name}: {', '.join(formats)}" if formats else name
