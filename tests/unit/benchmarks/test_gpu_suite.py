"""The suite for GPUs runs, rehearsed on the CPU with a tiny model."""

import json
import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT


@pytest.mark.full
def test_the_suite_runs_on_the_cpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--suite", "--device", "cpu", "--size", "tiny", "--json"]
    small = ["--dtype", "float32", "--streams", "1", "2", "--rounds", "1", "--tokens", "8", "--prompts", "64"]
    done = subprocess.run([*command, *small, "--kv-cache-mib", "64"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each["spread"]["median"] for each in json.loads(done.stdout)}
    assert found["answers in company equal to those alone"] == 100
    assert all(value > 0 for name, value in found.items() if name != "one more hop adds to a token")
    assert {"1 streams, steady", "2 streams with their prompts", "first token of 64"} <= found.keys()
