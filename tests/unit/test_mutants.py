"""The mistakes of `python -m tests.mutants` still apply to the present code."""

from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted(mutant: Mutant, tmp_path: Path) -> None:
    copied = tmp_path / mutant.file
    copied.parent.mkdir(parents=True)
    copied.write_text((ROOT / mutant.file).read_text(encoding="utf-8"), encoding="utf-8")
    mutant.plant(tmp_path)
    assert copied.read_text(encoding="utf-8").count(mutant.wrong) >= 1
    assert all((ROOT / path).exists() for path in mutant.tests)
