"""Documents name files, sections and modules that exist."""

import re
from pathlib import Path
from typing import Final

from tests.architecture.sources import PACKAGE, ROOT, identify

DOCUMENTS: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "charts").rglob("*.md"),
    ]
)
DECISIONS: Final = ROOT / "docs" / "decisions"
_LINK: Final = re.compile(r"\]\((?!\w+:)([\w./-]*)(?:#([\w-]+))?\)")
_CODE: Final = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The names by which links reach the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken = []
    for path in DOCUMENTS:
        for link, anchor in _LINK.findall(_CODE.sub("", path.read_text(encoding="utf-8"))):
            target = (path.parent / link).resolve() if link else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{identify(path)}: {link}#{anchor}")
    assert broken == []


def test_architecture_names_modules_that_exist() -> None:
    """Relative to the package, or to the room or folder that the sentence is about."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+)`", text)
    modules = {str(each.relative_to(PACKAGE).with_suffix("")) for each in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*")]}
    assert named
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not any(f"/{module}".endswith(f"/{name}") for module in modules)
    ]
    assert missing == []


def test_each_decision_says_at_its_head_whether_it_stands() -> None:
    for folder, word in ((DECISIONS, "stands"), (DECISIONS / "replaced", "replaced by")):
        heads = {each.name: each.read_text(encoding="utf-8").partition("\n## ")[0] for each in folder.glob("0*.md")}
        assert heads
        assert [name for name, head in heads.items() if f" · {word}" not in head] == []


def test_the_index_lists_each_decision_once() -> None:
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[\d+\]\(([\w./-]+)\)", index, re.MULTILINE)
    assert rows == [str(each.relative_to(DECISIONS)) for each in sorted(DECISIONS.rglob("0*.md"))]
