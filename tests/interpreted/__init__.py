"""Tests of the Triton kernels under Triton's interpreter, without a GPU.

They need triton, and a numpy below 2.3, which the interpreter needs; both lie in a folder of their own (`make triton`).
So a process of their own runs them, which `tests/unit/kernels/test_interpreted.py` starts.
"""

import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = Path(os.environ.get("COROLLA_TRITON", Path(sys.prefix) / "triton"))


def environment() -> dict[str, str]:
    """The environment of a process that interprets kernels."""
    paths = [str(PACKAGES), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_INTERPRET": "1"}
