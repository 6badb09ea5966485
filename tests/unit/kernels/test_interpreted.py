"""Kernels for GPUs without a GPU: a process with Triton's interpreter runs `tests/triton_kernels`."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.triton_kernels import FAMILIES, PACKAGES, QUICK_FAMILY, ROOT, environment

# A case in the interpreter takes seconds, and several may run at a time.
TIMEOUT_S = 3600

pytestmark = [
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="triton is not there: make triton"),
    pytest.mark.timeout(TIMEOUT_S),
]


CHAIN = "test_a_chain_gives_the_tokens_of_transformers"
NUM_PARTS = 4


def interpret(marks: str, *modules: str, chains: Sequence[str] = (), but: str = "") -> None:
    """Runs what has these marks in modules: the chains of families, or all tests but one."""
    ids = [f"tests/triton_kernels/{module}.py" for module in modules]
    ids = [f"{ids[0]}::{CHAIN}[{family}]" for family in chains] or ids
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


@pytest.mark.parametrize(
    "marks, modules",
    [
        pytest.param("not full", ["kernels", "mixtures", "choices"], id="each_kernel"),
        pytest.param("not full", ["states"], id="states", marks=pytest.mark.kind),
        pytest.param("not full", ["packed", "specialisations"], id="packed_weights"),
        pytest.param("not full", ["spans"], id="spans", marks=pytest.mark.kind),
        *(
            pytest.param("full", [module], id=f"{module}_of_every_kind", marks=pytest.mark.full)
            for module in ("kernels", "packed", "choices", "mixtures", "adapters", "specialisations", "states")
        ),
    ],
)
def test_kernels_compute_what_they_are_for_and_no_row_depends_on_the_others(marks: str, modules: list[str]) -> None:
    interpret(marks, *modules)


@pytest.mark.full
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_chains_of_families_with_every_feature(part: int) -> None:
    interpret("full", "spans", chains=[each for each in FAMILIES if each != QUICK_FAMILY][part::NUM_PARTS])


@pytest.mark.full
def test_spans_with_packed_weights_and_with_families_own_blocks() -> None:
    interpret("full", "spans", but=CHAIN)
