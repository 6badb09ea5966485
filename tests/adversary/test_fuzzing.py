"""Coverage-guided bytes, for a few seconds each: frames, handovers, session records, templates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = int(os.environ.get("COROLLA_TEST_FUZZING_S", "10"))
ATHERIS = Path(sys.prefix) / "fuzzing"
"""Where `make test-all` installs it: what it needs is not what Corolla needs."""
NAMES = ("frames", "handovers", "records", "samplers", "templates", "messages")


@pytest.mark.full
@pytest.mark.skipif(not ATHERIS.is_dir(), reason="atheris is not there: make fuzzing")
@pytest.mark.parametrize("name", NAMES)
def test_no_bytes_get_where_nobody_thought_of_them(tmp_path: Path, name: str) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    path = os.pathsep.join(filter(None, [str(ATHERIS), os.environ.get("PYTHONPATH", ""), os.getcwd()]))
    done = subprocess.run(
        [
            sys.executable, "-m", "tests.adversary.fuzzing", name, str(kept),
            f"-max_total_time={SECONDS}", "-seed=1", "-rss_limit_mb=4096", f"-artifact_prefix={tmp_path}/",
        ],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "DONE" in said
