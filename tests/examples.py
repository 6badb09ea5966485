"""The examples of README.md and docs/*.md: fenced blocks with a language."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.architecture.sources import ROOT, identify

PAGES: Final = tuple(identify(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
USUAL_ADDRESSES: Final = {"router": "127.0.0.1:50050", "client": "127.0.0.1:50051", "http": "127.0.0.1:8080"}
"""The addresses of `corolla up`, with which every example is written."""
_FENCED: Final = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """One fenced block.

    Attributes:
        page: path of the page, relative to the repository.
        line: number of the block's first line, for messages.
        text: the block without the indentation of its list.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def addressed(text: str, addresses: Mapping[str, str]) -> str:
    """An example with a test's own addresses. Nothing else in it is changed, so that readers run what tests run."""
    for name, address in addresses.items():
        if usual := USUAL_ADDRESSES.get(name):
            text = text.replace(usual, address)
    return text


def examples_of(page: str) -> Iterator[Example]:
    """Yields the examples of a page in their order. Blocks without a language show output or drawings."""
    content = Path(ROOT / page).read_text(encoding="utf-8")
    for found in _FENCED.finditer(content):
        line = content.count("\n", 0, found.start(3)) + 1
        yield Example(page, line, found[2], textwrap.dedent(found[3]))
