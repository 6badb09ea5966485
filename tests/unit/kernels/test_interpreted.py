"""Kernels for GPUs without a GPU: a process with Triton's interpreter runs `tests/triton_kernels`."""

import subprocess
import sys

import pytest

from tests.triton_kernels import FAMILIES, PACKAGES, QUICK_FAMILY, ROOT, environment

# A case in the interpreter takes seconds, and several may run at a time.
TIMEOUT_S = 3600

pytestmark = [
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="triton is not there: make triton"),
    pytest.mark.timeout(TIMEOUT_S),
]


CHAIN = "test_a_chain_gives_the_tokens_of_transformers"


def interpret(marks: str, *modules: str, case: str = "", but: str = "") -> None:
    """Runs what has these marks in modules: one case of it, or all tests but one."""
    ids = [f"tests/triton_kernels/{module}.py{f'::{case}' if case else ''}" for module in modules]
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks,
            "-k", f"not {but}" if but else "", f"--timeout={TIMEOUT_S}", *ids,
        ],
        env=environment(), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_kernels_compute_what_they_are_for_and_no_row_depends_on_the_others() -> None:
    interpret("not full", "kernels", "mixtures", "choices")


def test_packed_weights_are_the_numbers_of_a_processor() -> None:
    interpret("not full", "packed", "specialisations")


@pytest.mark.full
def test_products_with_packed_weights_of_every_layout() -> None:
    interpret("full", "packed")


@pytest.mark.kind
def test_spans_give_the_tokens_of_transformers_and_replayed_steps_the_bits_of_prompts() -> None:
    interpret("not full", "spans")


@pytest.mark.full
def test_a_start_compiles_what_serving_needs() -> None:
    interpret("full", "specialisations")


@pytest.mark.full
def test_batches_of_adapters() -> None:
    interpret("full", "adapters")


@pytest.mark.full
@pytest.mark.parametrize("family", [each for each in FAMILIES if each != QUICK_FAMILY])
def test_chains_of_families_with_every_feature(family: str) -> None:
    interpret("full", "spans", case=f"{CHAIN}[{family}]")


@pytest.mark.full
def test_spans_with_packed_weights_and_with_families_own_blocks() -> None:
    interpret("full", "spans", but=CHAIN)


@pytest.mark.full
def test_attention_over_pages_of_every_kind() -> None:
    interpret("full", "kernels")


@pytest.mark.full
def test_draws_of_every_width() -> None:
    interpret("full", "choices")


@pytest.mark.full
def test_mixtures_of_every_kind() -> None:
    interpret("full", "mixtures")
