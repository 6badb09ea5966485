"""`corolla kernels`: compiles kernels for GPUs before a server starts."""

import sys
import time
from typing import Annotated, get_args

import typer

kernels = typer.Typer(name="kernels", help="Compiles kernels for GPUs before a server starts.", no_args_is_help=True)


@kernels.command()
def build(
    model: Annotated[str, typer.Option(help="Checkpoint folder, GGUF file, hub id, or demo.")],
    arch: Annotated[
        str, typer.Option(help="Compute capabilities without the point, with commas between them.")
    ] = "80,89,90,100",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    page_tokens: Annotated[int, typer.Option(min=1, max=4096, help="COROLLA_PAGE_TOKENS of the servers.")] = 64,
    kv_cache_dtype: Annotated[str, typer.Option(help="COROLLA_KV_CACHE_DTYPE of the servers.")] = "auto",
    quantization: Annotated[str, typer.Option(help="COROLLA_QUANTIZATION of the servers.")] = "none",
) -> int:
    """Compiles the Triton kernels of a model into the folder TRITON_CACHE_DIR. It needs triton, and no GPU."""
    from corolla.cache.codecs import CODECS
    from corolla.chassis.errors import StartupError
    from corolla.chassis.weight_formats import QuantizationName
    from corolla.compute.kernel_build import build_kernels
    from corolla.models.checkpoint import Checkpoint
    from corolla.models.hub import Hub
    from corolla.wire.tensors import DTYPES

    if not all(each.strip().isdecimal() for each in arch.split(",")):
        raise StartupError(f"--arch {arch} has no compute capabilities: give numbers such as 80,90.")
    if dtype not in DTYPES:
        raise StartupError(f"--dtype {dtype} is no dtype of weights: choose from {', '.join(DTYPES)}.")
    if kv_cache_dtype not in ("auto", *CODECS):
        raise StartupError(f"--kv-cache-dtype {kv_cache_dtype} is unknown: choose from auto, {', '.join(CODECS)}.")
    if quantization not in (known := get_args(QuantizationName)):
        raise StartupError(f"--quantization {quantization} is unknown: choose from {', '.join(known)}.")
    checkpoint = Checkpoint.from_pretrained(model, hub=Hub())
    began_s = time.monotonic()
    archs = [int(each) for each in arch.split(",")]
    for built in build_kernels(checkpoint, archs, DTYPES[dtype], page_tokens, kv_cache_dtype, quantization):
        kib = sum(built.code_bytes.values()) / 1024
        seconds = time.monotonic() - began_s
        sys.stdout.write(f"sm_{built.arch}: {len(built.code_bytes)} kernels, {kib:.0f} KiB, after {seconds:.0f} s\n")
        sys.stdout.flush()
    return 0
