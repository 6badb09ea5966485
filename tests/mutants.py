"""Mistakes that a change could make in code that the simulation does not run, and a command that plants each of them.

    python -m tests.mutants                 # each mistake; the exit status is 0 if at most one stays unnoticed
    python -m tests.mutants top_k temperature

For each mistake the command copies the checkout, changes one place of the copy, and runs the tests of `make test` there
until the first one fails: those named with the mistake, and all others only if those pass.
Mistakes in what the simulation runs: `tests/simulation/mutants.py`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
MOST_UNNOTICED: Final = 1


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake.

    Attributes:
        name: how the command calls it.
        file: where it is made, relative to the checkout.
        right: the text that is replaced; it stands there once.
        wrong: what replaces it.
        tests: run first.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Makes the mistake in the checkout at `root`. Raises ValueError where the right text is not there once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.right)} times")
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")


_DECODING: Final = "services/corolla/decoding"
_SAMPLING_TESTS: Final = ("tests/unit/decoding",)

MUTANTS: Final = (
    Mutant(
        "temperature",
        f"{_DECODING}/sampling.py",
        "if any(each.temperature != 1 for each in params):",
        "if any(each.temperature > 1 for each in params):",
        _SAMPLING_TESTS,
    ),
    Mutant(
        "penalty_once",
        f"{_DECODING}/penalties.py",
        "scores = scores - (self._counts * frequencies",
        "scores = scores - ((self._counts > 0) * frequencies",
        _SAMPLING_TESTS,
    ),
    Mutant(
        "split_character",
        "services/corolla/client/text/detokenizer.py",
        "num_certain_chars = len(text.rstrip(REPLACEMENT))",
        "num_certain_chars = len(text)",
        ("tests/unit/client/text",),
    ),
    Mutant("stop_sequence_let_out", f"{_DECODING}/stopping.py", "default=1) - 1", "default=1) - 2", _SAMPLING_TESTS),
    Mutant(
        "page_written_while_shared",
        "services/corolla/cache/pages.py",
        "if self._num_holders[page] > 1:",
        "if self._num_holders[page] > 2:",
        ("tests/unit/cache",),
    ),
    Mutant(
        "page_count_rounded_down",
        "services/corolla/cache/pages.py",
        "return -(-num_tokens // self.page_tokens)",
        "return num_tokens // self.page_tokens + 1",
        ("tests/unit/cache",),
    ),
    Mutant(
        "frame_cut_short",
        "services/corolla/wire/frames.py",
        "if end > len(view):",
        "if payload_start > len(view):",
        ("tests/unit/wire",),
    ),
    Mutant(
        "token_beyond_vocabulary",
        "services/corolla/client/api/requests.py",
        "(largest := max(checked)) >= vocab_size",
        "(largest := max(checked)) > vocab_size",
        ("tests/unit/client", "tests/integration/test_bad_input.py"),
    ),
    Mutant(
        "root_in_the_pod",
        "charts/corolla/values.yaml",
        "      runAsNonRoot: true",
        "      runAsNonRoot: false",
        ("tests/charts",),
    ),
    Mutant(
        "budget_allows_the_last_one",
        "charts/corolla/templates/_pods.tpl",
        "{{ ternary 1 0 (gt (int .replicas) 1) }}",
        "{{ ternary 1 0 (gt (int .replicas) 0) }}",
        ("tests/charts",),
    ),
)


def copy_checkout(folder: Path) -> None:
    """Copies what git tracks, as it stands now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def notices(checkout: Path, paths: tuple[str, ...]) -> str:
    """The first test of the checkout that fails; empty where none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "services")}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].partition(" ")[2].partition(" - ")[0] if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(each.name for each in MUTANTS)}; none: all of them")
    names = parser.parse_args().names
    if unknown := set(names) - {each.name for each in MUTANTS}:
        parser.error(f"no such mistake: {', '.join(sorted(unknown))}")
    num_unnoticed = 0
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="corolla-mutant-") as name:
            folder = Path(name)
            copy_checkout(folder)
            mutant.plant(folder)
            noticed_by = notices(folder, mutant.tests) or notices(folder, ())
        num_unnoticed += not noticed_by
        seconds = time.monotonic() - started_s
        sys.stdout.write(f"{mutant.name:28} {seconds:5.0f} s  {noticed_by or 'NOBODY NOTICED'}\n")
        sys.stdout.flush()
    return int(num_unnoticed > (0 if names else MOST_UNNOTICED))


if __name__ == "__main__":
    sys.exit(main())
