"""docs/testing.md names tests that exist, and every promise of docs/reliability.md."""

import re

from tests.architecture.sources import ROOT

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r"`((?:architecture|charts|cluster|integration|simulation|unit|tests)(?:/[\w./]+)?)`", PAGE)
    missing = [name for name in named if not any((ROOT / folder / name).exists() for folder in ("tests", "."))]
    assert named
    assert missing == []


def test_every_promise_has_its_tests() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    promises = text.partition("## Promises")[2].partition("\n## ")[0]
    numbers = re.findall(r"^(\d+)\. \*\*", promises, re.MULTILINE)
    assert numbers == re.findall(r"^\| (\d+) ", PAGE, re.MULTILINE)
