"""Says whether the kernels can run here."""

import functools
import importlib.util
import os


@functools.cache
def missing() -> str | None:
    """Says what this process lacks to run the kernels on a GPU, as a sentence's end; None: it lacks nothing."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; it comes with torch's build for CUDA"
    return None


def is_interpreted() -> bool:
    """True if Triton interprets the kernels on the CPU; otherwise it compiles them for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
