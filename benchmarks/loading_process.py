"""Loads one part of a model as a block server does, and prints as JSON what that took.

python -m benchmarks.loading_process MODEL PART DTYPE QUANTIZATION
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from corolla.chassis import heap
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import Edges, load_edges
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES


def main(model: str, part: str, dtype_name: str, quantization: str) -> None:
    transformers_logging.set_verbosity_error()
    dtype = DTYPES[dtype_name]
    heap.expect_loading()
    checkpoint = Checkpoint.from_pretrained(model)
    # A first load takes what a process takes that holds nothing: modules, and kernels that are compiled.
    _load(checkpoint, "blocks 0:1" if part.startswith("blocks ") else part, dtype, quantization)
    heap.settle()
    heap.release()
    heap.expect_loading()
    idle = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    held, kept = _load(checkpoint, part, dtype, quantization)
    seconds = time.perf_counter() - started
    peak = _memory("VmHWM") - idle
    heap.settle()
    print(json.dumps({"held": held, "peak": peak, "resident": _memory("VmRSS") - idle, "seconds": seconds}))
    del kept


def _load(checkpoint: Checkpoint, part: str, dtype: torch.dtype, quantization: str) -> tuple[int, SpanRunner | Edges]:
    """Bytes of its weights, and what holds them."""
    if part.startswith("blocks "):
        span = Span.parse(part.removeprefix("blocks "))
        model = load_span(checkpoint, span, dtype=dtype, quantization=quantization)
        held = model.nbytes
        return held, SpanRunner(model, num_pages=1, page_tokens=16)
    edges = load_edges(
        checkpoint, dtype=dtype, has_embedding="embedding" in part, has_head="head" in part, quantization=quantization
    )
    held = edges.nbytes
    if edges.has_head:
        edges.choose_products()
    return held, edges


def _memory(name: str) -> int:
    """Bytes of this process, as the kernel counts them."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


if __name__ == "__main__":
    main(*sys.argv[1:])
