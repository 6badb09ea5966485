"""What loading takes: the peak, what stays, and the time, for a span, the embedding and the head.

    python -m benchmarks.loading --dtypes float32 bfloat16

Each part is loaded in a process of its own, as a block server does it, from the model's file and, where that is a GGUF
file, packed, and from what it unpacks to, too. Peak and what stays are measured above the process as it was after it
had loaded one block, or the same end, and given it up, and divided by the bytes of the part itself.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

from benchmarks.command import progress, run
from benchmarks.figures import Figure, at_most, figure
from benchmarks.local_model import unsplit_folder
from corolla.chassis.processors import OPENMP_WAITING
from corolla.chassis.weight_formats import PACKED
from corolla.models.checkpoint import Checkpoint

_MIB: Final = 1 << 20
MOST_PEAK: Final = 1.3
MOST_RESIDENT: Final = 1.15


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    middle = checkpoint.num_blocks // 2
    parts = (f"blocks 0:{middle}", f"blocks 0:{checkpoint.num_blocks}", "embedding", "head", "embedding and head")
    sources = {"safetensors": (str(unsplit_folder(checkpoint)), "none")}
    if checkpoint.gguf is not None:
        sources.update({"GGUF": (options.model, "none"), "GGUF packed": (options.model, PACKED)})
    for source, (model, quantization) in sources.items():
        for dtype in options.dtypes:
            for part in parts:
                what = f"{source}, {dtype}, {part}"
                yield from loading(what, model, part, dtype, quantization=quantization, rounds=options.rounds)
    progress("")


def loading(
    what: str,
    model: str,
    part: str,
    dtype: str,
    *,
    quantization: str = "none",
    rounds: int = 1,
) -> Iterator[Figure]:
    """What loading a part takes, in a process of its own."""
    progress(what)
    found = [loaded(model, part, dtype, quantization) for _ in range(rounds)]
    held = median(each["held"] for each in found)
    yield figure(f"{what}, held", "MiB", [held / _MIB])
    for name, most in (("peak", MOST_PEAK), ("resident", MOST_RESIDENT)):
        yield figure(f"{what}, {name}", "x", [each[name] / held for each in found], at_most(most))
    yield figure(f"{what}, time", "s", [each["seconds"] for each in found])


def loaded(model: str, part: str, dtype: str, quantization: str = "none") -> dict[str, Any]:
    """Bytes of a part's weights, of the peak and of what stays above an idle process, and seconds."""
    command = [sys.executable, "-m", "benchmarks.loading_process", model, part, dtype, quantization]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **OPENMP_WAITING}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return facts


if __name__ == "__main__":
    run(__doc__, add_options, measure)
