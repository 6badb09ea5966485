"""Kernels for GPUs without a GPU: a process with Triton's interpreter runs `tests/triton_kernels`."""

import subprocess
import sys

import pytest

from tests.triton_kernels import PACKAGES, ROOT, environment

# A case in the interpreter takes seconds, and several may run at a time.
TIMEOUT_S = 900

pytestmark = [
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="triton is not there: make triton"),
    pytest.mark.timeout(TIMEOUT_S),
]


def interpret(marks: str, *modules: str) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks,
            f"--timeout={TIMEOUT_S}", *(f"tests/triton_kernels/{module}.py" for module in modules),
        ],
        env=environment(), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_kernels_compute_what_they_are_for_and_no_row_depends_on_the_others() -> None:
    interpret("not full", "kernels", "mixtures")


def test_packed_weights_are_the_numbers_of_a_processor() -> None:
    interpret("not full", "packed")


@pytest.mark.full
def test_products_with_packed_weights_of_every_layout() -> None:
    interpret("full", "packed")


@pytest.mark.kind
def test_spans_give_the_tokens_of_transformers_and_replayed_steps_the_bits_of_prompts() -> None:
    interpret("not full", "spans")


@pytest.mark.full
def test_batches_of_adapters() -> None:
    interpret("full", "adapters")


@pytest.mark.full
def test_spans_of_families_with_every_feature() -> None:
    interpret("full", "spans")


@pytest.mark.full
def test_attention_over_pages_of_every_kind() -> None:
    interpret("full", "kernels")


@pytest.mark.full
def test_mixtures_of_every_kind() -> None:
    interpret("full", "mixtures")
