"""How settings and commands spell the weight formats that block servers run."""

from typing import Final, Literal

DtypeName = Literal["float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4"]
DTYPE_ABBREVIATIONS: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def full_dtype_name(name: str) -> str:
    """`float32` for `fp32`, and so on; anything else as it came."""
    return DTYPE_ABBREVIATIONS.get(name, name)


def weight_format(dtype: str, quantization: str, expanded_from: str | None = None) -> str:
    """All in some words, for people: `float32`, `int4/bf16`, or, of packed weights, `bfloat16 from awq`."""
    if quantization == "none":
        held = dtype
    else:
        short = {full: abbreviation for abbreviation, full in DTYPE_ABBREVIATIONS.items()}
        held = f"{quantization}/{short.get(dtype, dtype)}"
    return held if expanded_from is None else f"{held} from {expanded_from}"
