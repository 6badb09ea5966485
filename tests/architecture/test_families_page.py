"""What documents say of families is what the table of families says."""

import re

from corolla.models.families import FAMILIES
from tests.architecture.sources import ROOT
from tests.checkpoints import RECURRENT_FAMILIES


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_families_with_recurrent_states_are_marked() -> None:
    assert {name for name, family in FAMILIES.items() if family.past.keeps_states} == set(RECURRENT_FAMILIES)


def test_documents_count_the_families() -> None:
    counts = re.findall(r"(?:each of|all) (\d+) families", page("README.md") + page("docs/testing.md"))
    assert counts == [str(len(FAMILIES))] * 2
