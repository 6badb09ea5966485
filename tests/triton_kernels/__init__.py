"""Tests of the Triton kernels: under Triton's interpreter without a GPU, and on one.

The interpreter needs triton, and a numpy below 2.3; both lie in a folder of their own (`make triton`). So a process of
its own runs the tests, which `tests/unit/kernels/test_interpreted.py` starts. `tests/gpu/test_kernels.py` starts
another one, in which the same tests run on the GPU.
"""

import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DEVICE: Final = os.environ.get("COROLLA_KERNELS_DEVICE", "cpu")
FAMILIES: Final = [
    "qwen3", "granite", "afmoe", "glm", "gemma2", "gemma3_text", "olmo3", "cohere", "nemotron",
    "gpt_oss", "hunyuan_v1_dense", "ministral3", "apertus",
]  # fmt: skip
"""Families whose chains run by the kernels: together they have every feature that any family has there."""
QUICK_FAMILY: Final = "qwen3"
STATE_FAMILIES: Final = [
    "qwen3_next", "deepseek_v3", "kimi_linear", "granitemoehybrid", "falcon_h1", "glm4_moe_lite", "lfm2", "olmo_hybrid",
    "bamba",
]  # fmt: skip
"""Families with recurrent states or latents that run by the kernels."""
PACKAGES: Final = Path(os.environ.get("COROLLA_TRITON", Path(sys.prefix) / "triton"))


def environment() -> dict[str, str]:
    """The environment of a process that interprets kernels."""
    paths = [str(PACKAGES), str(ROOT / "services"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_INTERPRET": "1"}


def gpu_environment() -> dict[str, str]:
    """The environment of a process that runs the kernels on the GPU."""
    return {**os.environ, "COROLLA_KERNELS_DEVICE": "cuda"}
