"""What a process takes that loads a whole model packed, beyond what it took with one block.

    python -m benchmarks.packed_process MODEL.gguf DTYPE

Prints JSON: bytes resident afterwards, at the peak while loading, and of the weights in the file.
"""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path

import torch

from corolla.chassis.weight_formats import PACKED
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.span_model import load_span
from corolla.wire.span import Span

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def main(model: str, dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    checkpoint = Checkpoint.from_pretrained(model)
    whole = Span(0, checkpoint.num_blocks)

    def load(span: Span) -> list[object]:
        blocks = load_span(checkpoint, span, dtype=dtype, quantization=PACKED)
        blocks.make_fused(tuning_budget_s=0.0)
        return [blocks, load_edges(checkpoint, dtype=dtype, quantization=PACKED)]

    held = load(Span(0, 1))
    held.clear()
    _give_back()
    before = _bytes("VmRSS")
    _CLEAR.write_text(_RESET_PEAK)
    held = load(whole)
    peak = _bytes("VmHWM")
    _give_back()
    resident = _bytes("VmRSS")
    stored = sum(each.num_bytes for each in checkpoint.gguf.header.tensors.values()) if checkpoint.gguf else 0
    print(json.dumps({"resident": resident - before, "peak": peak - before, "stored": stored}))


def _give_back() -> None:
    """Returns what is free to the system, so that only what is held counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _bytes(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"the system does not say {name}")
    return int(match[1]) << 10


if __name__ == "__main__":
    main(*sys.argv[1:])
