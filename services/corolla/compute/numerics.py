"""Names what decides the bits that a server computes: its device, its versions, and the kernels that it chose."""

import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Final

import torch
import transformers

from corolla.compute.span_runner import SpanRunner
from corolla.models.edges import Edges
from corolla.wire.numerics import Numerics, digest_of

# Products in half precision round in another way with these: of x86, and then of Arm.
_INSTRUCTIONS: Final = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "sve_bf16")


def numerics_of(runner: SpanRunner, edges: Edges | None) -> Numerics:
    """The numerics of a server that has loaded its span and chosen its kernels.

    Args:
        edges: the ends of the model that the server has; None: none.
    """
    machine = machine_facts(runner.model.device, runner.model.dtype)
    head = ""
    if edges is not None and edges.has_head:
        products = {f"product {shape}": way for shape, way in edges.product_ways.items()}
        head = digest_of(_with_threads({**machine, **products}))
    return Numerics(digest_of(_with_threads({**machine, **_choices(runner)})), head)


def kind_of(device: torch.device, dtype: torch.dtype, settings: Mapping[str, str]) -> str:
    """The digest of what decides the numerics of a server and is known before it has a span.

    Args:
        settings: the settings that choose kernels.
    """
    return digest_of({**machine_facts(device, dtype), **settings})


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The device's kind, the dtype and the versions, since kernels of another release may round in another way."""
    compiler = "triton" if device.type == "cuda" else "llvmlite"
    instructions = ""
    if device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    else:
        kind = f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        instructions = " ".join(filter(torch.cpu.get_capabilities().get, _INSTRUCTIONS))
    return {
        "corolla": importlib.metadata.version("corolla"),
        "compiler": _version(compiler),
        "device": kind,
        "dtype": str(dtype),
        "instructions": instructions,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _choices(runner: SpanRunner) -> dict[str, str]:
    """What was chosen for the blocks at start, by rules, trials and settings; see `KernelChoices`."""
    codec = runner.store.codec
    return {
        **runner.kernel_choices.choices(),
        "caches": "auto" if codec is None else type(codec).__name__,
        "page": str(runner.store.pool.page_tokens),
        "steps": "recorded" if runner.decode_graphs is not None else "",
    }


def _with_threads(facts: dict[str, str]) -> dict[str, str]:
    """The facts, with the number of threads if products run in libraries, which may divide a sum among threads."""
    ways = {way for name, each in facts.items() if name.startswith(("product", "blocks")) for way in each.split("+")}
    if ways & {"library", "onednn", "latents", "states"} and facts["device"].startswith("cpu"):
        return {**facts, "threads": str(torch.get_num_threads())}
    return facts
