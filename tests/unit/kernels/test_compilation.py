"""`corolla kernels build` compiles machine code without a GPU, and a second start finds all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from corolla.cache.codecs import CODECS
from corolla.kernels.triton.compilation import SHARED_MEMORY
from tests.checkpoints import make_tiny_checkpoint
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint
from tests.triton_kernels import PACKAGES, ROOT, environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="triton is not there: make triton"),
    pytest.mark.timeout(600),
]


# A few registers of each thread.
MOST_SPILLED_BYTES = 192


def build(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    compiling = {**environment(), "TRITON_CACHE_DIR": str(cache)}
    del compiling["TRITON_INTERPRET"]
    return subprocess.run(
        [sys.executable, "-m", "corolla", "kernels", "build", *arguments],
        env=compiling, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_kernels_are_compiled_for_architectures_that_are_not_here(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("qwen3", tmp_path / "model", config_changes={"head_dim": 64})
    cache = tmp_path / "cache"
    first = build(cache, "--model", str(folder), "--arch", "80,89,90,100")
    assert first.returncode == 0, first.stderr
    assert [line.partition(":")[0] for line in first.stdout.splitlines()] == ["sm_80", "sm_89", "sm_90", "sm_100"]
    binaries = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    # Norms with and without a sum, gate, rotation, pages, merge, chunks, and products of four heights.
    assert len(binaries) >= 4 * 11
    assert all(path.read_bytes()[:4] == b"\x7fELF" for path in binaries)
    again = build(cache, "--model", str(folder), "--arch", "90")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")} == binaries


def printed(cache: Path, *module: str) -> list[str]:
    """The lines that a module prints, which compiles kernels."""
    compiling = {**environment(), "TRITON_CACHE_DIR": str(cache)}
    del compiling["TRITON_INTERPRET"]
    done = subprocess.run([sys.executable, "-m", *module], env=compiling, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout.splitlines()


def test_a_repeated_launch_gives_the_device_what_triton_gives_it(tmp_path: Path) -> None:
    module = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/triton_kernels/repeated_launches.py")
    assert "4 passed" in printed(tmp_path, *module)[-1]


def test_kernels_fit_into_the_smallest_gpu(tmp_path: Path) -> None:
    """A kernel that asks for more shared memory is not launched; one that spills its sums is many times slower."""
    found = [line.split() for line in printed(tmp_path, "tests.triton_kernels.resources")]
    assert {name for name, *_ in found} == {
        "attend_chunks", "attend_pages", "merge_pages", "multiply", "multiply_packed", "multiply_packed_experts",
    }  # fmt: skip
    assert max(int(shared) for _, shared, _ in found) <= min(SHARED_MEMORY.values())
    assert max(int(spilled) for *_, spilled in found) <= MOST_SPILLED_BYTES


def test_a_product_with_packed_weights_takes_columns_as_one_with_expanded_weights_does(tmp_path: Path) -> None:
    """And each thread unpacks the weights that its own instructions take, in every layout.

    Tiles of all heights have one kind of instructions on compute capability 10.0.
    """
    found = dict(line.split(": ") for line in printed(tmp_path, "tests.triton_kernels.instruction_columns"))
    assert {found.pop(codec) for codec in CODECS} == {"2"}
    dtypes = ("torch.bfloat16", "torch.float16")
    assert {found.pop(f"instructions for {dtype}") for dtype in dtypes} == {"versionMajor = 2"}
    assert found.keys() >= {"Q4_0", "Q8_0", "Q6_K", "E4M3 of 128, float32"}
    assert set(found.values()) == {"2 0"}


@pytest.mark.parametrize("quantization", ["int8", "packed"])
def test_kernels_of_packed_weights_are_compiled(tmp_path: Path, quantization: str) -> None:
    changes = {"head_dim": 64}
    if quantization == "packed":
        folder, _ = make_packed_checkpoint("mixtral", tmp_path, FORMATS["awq"](), num_blocks=1, changes=changes)
    else:
        folder = make_tiny_checkpoint("qwen3", tmp_path / "model", num_blocks=1, config_changes=changes)
    cache = tmp_path / "cache"
    done = build(cache, "--model", str(folder), "--arch", "90", "--quantization", quantization)
    assert done.returncode == 0, done.stderr
    # The tiles of four heights.
    assert len(list(cache.rglob("multiply_packed.cubin"))) >= 4
    # Gate and up, and down, in four heights.
    assert len(list(cache.rglob("multiply_packed_experts.cubin"))) == (2 * 4 if quantization == "packed" else 0)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--arch", "91"), "Kernels cannot be compiled for 91: choose from 80"),
        (("--arch", "sm_90"), "--arch sm_90 has no compute capabilities"),
        (("--arch", "90"), "There is nothing to compile"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    folder = make_tiny_checkpoint("gpt_neox", tmp_path / "model")
    done = build(tmp_path / "cache", "--model", str(folder), *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert os.listdir(tmp_path) == ["model"]
