"""The kernels on a GPU, by the tests that the interpreter runs on the CPU."""

import subprocess
import sys

import pytest
import torch

from tests.triton_kernels import ROOT, gpu_environment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.mark.parametrize("module", ["adapters", "choices", "kernels", "mixtures", "packed", "spans", "states"])
def test_kernels_on_the_device(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "full or not full",
            f"tests/triton_kernels/{module}.py"],
        env=gpu_environment(), cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
