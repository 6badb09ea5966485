"""The suite for GPUs: its arithmetic, and all of its parts rehearsed on the CPU with a tiny model."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import command, gpu, gpu_suite
from benchmarks.figures import Figure, figure
from benchmarks.timing import Timing
from tests.architecture.sources import ROOT

_SMALL = ("--suite", "--device", "cpu", "--size", "tiny", "--dtype", "float32", "--kv-cache-mib", "64")


@pytest.mark.full
def test_the_suite_runs_on_the_cpu() -> None:
    small = ["--streams", "1", "2", "--rounds", "1", "--tokens", "8", "--prompts", "64", "--kills", "1"]
    whole = [sys.executable, "-m", "benchmarks.gpu", *_SMALL, *small, "--json"]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each["spread"]["median"] for each in json.loads(done.stdout)}
    equal = [value for name, value in found.items() if "equal to" in name]
    assert equal == [100, 100, 100]
    assert all(value > 0 for name, value in found.items() if name != "one more hop adds to a token")
    assert {
        "1 streams, steady", "2 streams with their prompts", "first token of 64", "a token with 512 held / 128",
        "largest of these gaps, 1 kills", "0.00195 GiB handed over beside 8 streams", "1 streams in 4 bits / float32",
        "ready, one server", "ready, two servers", "ready, started again beside others",
    } <= found.keys()  # fmt: skip


def test_a_part_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_suite: gpu_suite.Suite) -> Iterator[Figure]:
        yield figure("before", "x", [1.0])
        raise TimeoutError("the kill did not\n happen")

    def whole(_suite: gpu_suite.Suite) -> Iterator[Figure]:
        yield figure("after", "x", [2.0])

    monkeypatch.setattr(gpu, "PARTS", {"kills": broken, "ready": whole})
    arguments = [*_SMALL, "--scratch", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as ended:
        command.run(gpu.__doc__, gpu.add_options, gpu.measure, arguments)
    assert ended.value.code == 1
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert [(each["name"], each["verdict"], each["error"]) for each in rows[-3:]] == [
        ("before", "", ""), ("kills", "FAILED", "TimeoutError: the kill did not happen"), ("after", "", ""),
    ]  # fmt: skip
    assert rows[-2]["spread"] is None
    assert "kills: FAILED, TimeoutError: the kill did not happen" in shown.err.splitlines()


def test_servers_that_share_a_device_get_equal_parts_of_what_weights_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (40_000 << 20, 80_000 << 20))
    shared = argparse.Namespace(kv_cache_mib=0, device="cuda")
    part = gpu_suite.cache_mib(shared, tmp_path, 3, 1.5)
    # A server needs some GiB beside weights and pages, and a part of the memory stays free.
    assert 3 * (part + 2048) < 40_000 - 1.5 < 3 * (part + 6144)
    assert gpu_suite.cache_mib(shared, tmp_path, 1) == 0
    assert gpu_suite.cache_mib(argparse.Namespace(kv_cache_mib=64, device="cuda"), tmp_path, 3) == 64
    assert gpu_suite.cache_mib(argparse.Namespace(kv_cache_mib=0, device="cpu"), tmp_path, 3) == 0


def test_a_gap_counts_if_a_part_of_it_lies_in_the_time() -> None:
    timing = Timing(0.0, (1.0, 4.0, 4.5, 6.0))
    assert timing.longest_gap_s(0.0) == 3.0
    assert timing.longest_gap_s(4.2) == 1.5
    assert timing.longest_gap_s(4.2, 4.4) == 0.5
    assert timing.longest_gap_s(7.0) == 0.0


def test_answers_are_equal_by_their_tokens() -> None:
    answers = [Timing(0.0, (1.0, 2.0), (5, number)) for number in range(4)]
    assert gpu_suite.percent_equal(answers, answers[::-1]) == 0
    assert gpu_suite.percent_equal(answers, [*answers[:3], Timing(9.0, (9.0,), (5,))]) == 75
