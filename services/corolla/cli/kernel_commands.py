"""`corolla kernels`: compiles kernels for GPUs before a server starts."""

import sys
import time
from typing import Annotated

import typer

from corolla.chassis.weight_formats import KVCacheDtypeName, QuantizationName, full_dtype_name
from corolla.cli.stack_commands import DtypeOption

kernels = typer.Typer(name="kernels", help="Compiles kernels for GPUs before a server starts.", no_args_is_help=True)


@kernels.command()
def build(
    model: Annotated[str, typer.Option(help="Checkpoint folder, GGUF file, hub id, or demo.")],
    arch: Annotated[
        str, typer.Option(help="Compute capabilities without the point, with commas between them.")
    ] = "80,89,90,100",
    dtype: Annotated[DtypeOption, typer.Option(help="Type of weights and cache.")] = "bfloat16",
    page_tokens: Annotated[int, typer.Option(min=1, max=4096, help="COROLLA_PAGE_TOKENS of the servers.")] = 64,
    kv_cache_dtype: Annotated[KVCacheDtypeName, typer.Option(help="COROLLA_KV_CACHE_DTYPE of the servers.")] = "auto",
    quantization: Annotated[QuantizationName, typer.Option(help="COROLLA_QUANTIZATION of the servers.")] = "none",
) -> int:
    """Compiles the Triton kernels of a model into the folder TRITON_CACHE_DIR. It needs triton, and no GPU."""
    from corolla.chassis.errors import StartupError
    from corolla.compute.kernel_build import build_kernels
    from corolla.models.checkpoint import Checkpoint
    from corolla.models.hub import Hub
    from corolla.wire.tensors import DTYPES

    if not all(each.strip().isdecimal() for each in arch.split(",")):
        raise StartupError(f"--arch {arch} has no compute capabilities: give numbers such as 80,90.")
    checkpoint = Checkpoint.from_pretrained(model, hub=Hub())
    began_s = time.monotonic()
    archs = [int(each) for each in arch.split(",")]
    weights = DTYPES[full_dtype_name(dtype)]
    for built in build_kernels(checkpoint, archs, weights, page_tokens, kv_cache_dtype, quantization):
        kib = sum(built.code_bytes.values()) / 1024
        seconds = time.monotonic() - began_s
        sys.stdout.write(f"sm_{built.arch}: {len(built.code_bytes)} kernels, {kib:.0f} KiB, after {seconds:.0f} s\n")
        sys.stdout.flush()
    return 0
