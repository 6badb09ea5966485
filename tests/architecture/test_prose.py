"""Docstrings and comments have a subject, and name the people and things that they are about."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.architecture.sources import ROOT, identify

CLEAN: Final = (
    "services", "tests", "benchmarks", "tools", "charts", "Makefile", "Dockerfile.client", "Dockerfile.server",
)  # fmt: skip
"""The folders and files that keep to these rules."""

_OPENINGS: Final = re.compile(
    r"(?:Of|As|From|To|By|With|Without|For(?! example\b)|At|On)\b(?! (?:first|least|most|once)\b)"
)
"""What begins with a preposition lacks its subject, or has it late."""
_RIDDLES: Final = re.compile(
    r"\b(?:whoever|nobody)\b|(?<!there )\b(?:is|are|was|were) (?:none\b(?! of\b)|no (?!longer\b|more\b))|"
    r"(?:^|[.:;] )who (?![^.]*\?)",
    re.IGNORECASE,
)
"""Words for people and things that the sentence does not name."""
_DIRECTIVES: Final = re.compile(r"(?:noqa|fmt:|type:|pragma|ruff:|!)")
_SCRIPT_COMMENT: Final = re.compile(r"^ *# ?(?:-- )?(.*)$")

Prose = tuple[int, str]
"""A docstring or a block of comments, and the line where it begins."""


def files() -> list[Path]:
    """What people wrote under the clean folders; this list of words is no subject of its own rules."""
    found = []
    for name in CLEAN:
        place = ROOT / name
        found += [place] if place.is_file() else [each for each in place.rglob("*.*") if each.suffix in _READERS]
    return sorted(each for each in found if each != Path(__file__) and each.is_file())


def prose_of_python(path: Path) -> Iterator[Prose]:
    """Yields docstrings, also those below attributes, and comments."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # A string that stands alone is a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    with tokenize.open(path) as file:
        comments = [
            (each.start[0], each.string.removeprefix("#"), not each.line[: each.start[1]].strip())
            for each in tokenize.generate_tokens(file.readline)
            if each.type == tokenize.COMMENT
        ]
    yield from joined(comments)


def prose_of_script(path: Path) -> Iterator[Prose]:
    """Yields the comments that have lines of their own in a YAML file, a template, a Makefile or a Dockerfile."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    yield from joined([(number, found[1], True) for number, line in lines if (found := _SCRIPT_COMMENT.match(line))])


def joined(comments: list[tuple[int, str, bool]]) -> Iterator[Prose]:
    """Joins comments of consecutive lines, which are one text. A comment behind code is a text of its own."""
    block: list[str] = []
    begun = last = -1
    for number, text, has_own_line in comments:
        if block and (number != last + 1 or not has_own_line):
            yield begun, " ".join(block)
            block = []
        if not block:
            begun = number
        block.append(text.strip())
        last = number if has_own_line else -1
    if block:
        yield begun, " ".join(block)


_READERS: Final = {
    ".py": prose_of_python, ".yaml": prose_of_script, ".tpl": prose_of_script, "": prose_of_script,
    ".client": prose_of_script, ".server": prose_of_script,
}  # fmt: skip


def faults_of(text: str) -> list[str]:
    """The words at which a docstring or comment breaks the rules."""
    words = " ".join(text.split())
    if _DIRECTIVES.match(words):
        return []
    opening = _OPENINGS.match(words)
    return ([f"{opening[0]} …"] if opening else []) + [found[0].strip(" .:;") for found in _RIDDLES.finditer(words)]


def test_docstrings_and_comments_are_sentences_that_name_what_they_are_about() -> None:
    odd = [
        f"{identify(path)}:{line}: {fault}: {' '.join(text.split())[:90]}"
        for path in files()
        for line, text in _READERS[path.suffix](path)
        for fault in faults_of(text)
    ]
    assert odd == [], "\n".join([f"{len(odd)} openings and words:", *odd])


def test_an_opening_and_a_riddle_are_found() -> None:
    assert faults_of("Of a request.") == ["Of …"]
    assert faults_of("Whoever reads it knows; nobody else does, and it is no riddle.") == ["Whoever", "nobody", "is no"]
    assert faults_of("Who asks gets an answer.") == ["Who"]
    assert faults_of("noqa: S101") == []
    assert faults_of("For example a caller who stays is no longer asked who it is.") == []
