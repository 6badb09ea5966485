"""One name for one thing, and that of the field: words that had another name here do not come back."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.architecture.sources import PACKAGE, ROOT, identify, own_modules, walk

# What stands on the left has the name on the right.
WORDS: Final = {
    "aside": "in a thread of its own",
    "attendance": "the microbatch rules",
    "beside": "next to",
    "census": "placement statistics",
    "concern": "affect",
    "departure": "the microbatch rules, or a server that deregisters",
    "forsake": "orphan",
    "forsaken": "orphaned",
    "gang": "microbatch",
    "guess": "draft token",
    "kept output": "boundary activation",
    "lean": "fused",
    "mend": "recover",
    "nursery": "fork server",
    "scribe": "pod recorder",
    "suit": "fit",
    "take up": "continue from",
    "told": "notified",
}
# Outside of services/ these are plain English in prose, and odd in a name only.
PLAIN_ENGLISH: Final = frozenset({"aside", "beside", "concern", "departure", "suit", "told"})


def forms(words: Iterable[str]) -> re.Pattern[str]:
    """The words, also with the endings of plurals and of verbs."""
    return re.compile(rf"\b(?:{'|'.join(sorted(words))})(?:s|es|ed|ing)?\b")


_FORMS: Final = forms(WORDS)
_NEVER: Final = forms(WORDS.keys() - PLAIN_ENGLISH)
_PLACES: Final = ("docs", "protos", "charts", "benchmarks", "tests", "tools")
_TEXTS: Final = (".lua", ".md", ".proto", ".py", ".tpl", ".txt", ".yaml")


def texts() -> list[Path]:
    """What people write outside of services/; not the novel of the benchmarks, nor this list."""
    others = {ROOT / "benchmarks" / "passage.txt", Path(__file__)}
    inside = [path for place in _PLACES for path in (ROOT / place).rglob("*") if path.suffix in _TEXTS]
    return sorted(path for path in [*ROOT.glob("*.md"), ROOT / "Makefile", *inside] if path not in others)


def names_of(path: Path) -> Iterator[str]:
    """Names that a module gives: to functions, classes, arguments, attributes and variables."""
    for node in walk(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


_CIPHER_SUITES: Final = "cipher suites"  # the field's own
# Settings of 0.1.0, which services name when they are still set.
_FORMER_NAMES: Final = re.compile(r"LEAN_BLOCKS|KEPT_OUTPUTS_MIB|PREFILL_(?:CHUNK_)?TOKENS_BESIDE_DECODE")


def words_of(text: str) -> str:
    """Names cut into their words: `GangRules` and `gang_rules` are both `gang rules`."""
    text = _FORMER_NAMES.sub("", text)
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", text).lower().replace(_CIPHER_SUITES, "")


def test_modules_use_the_fields_words() -> None:
    odd = [
        f"{identify(path)}:{number}: {found[0]}"
        for path in [*own_modules(PACKAGE), *sorted(PACKAGE.rglob("*.lua"))]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for found in _FORMS.finditer(words_of(line))
    ]
    assert odd == []


def test_texts_use_the_fields_words() -> None:
    odd = []
    for path in texts():
        text = path.read_text(encoding="utf-8")
        if path.name == "CHANGELOG.md":
            text = re.sub(r"`[^`]*`", "", text)  # former names
        odd += [f"{identify(path)}: {word}" for word in _NEVER.findall(words_of(text))]
    assert odd == []


def test_names_use_the_fields_words() -> None:
    odd = [
        f"{identify(path)}: {name}"
        for path in own_modules(*(ROOT / place for place in _PLACES))
        if path != Path(__file__)
        for name in names_of(path)
        if _FORMS.search(words_of(name))
    ]
    assert odd == []


def test_odd_words_are_found_in_names_and_in_prose() -> None:
    text = words_of("class GangRules: take_up(kept_outputs)  # who is told, and who is clean, described, recommended")
    assert _FORMS.findall(text) == ["gang", "take up", "kept outputs", "told"]


def test_files_and_folders_have_the_words_of_the_field() -> None:
    names = [
        str(path.relative_to(ROOT))
        for folder in (PACKAGE, *(ROOT / place for place in _PLACES))
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    ]
    assert [name for name in names if _FORMS.search(words_of(name.replace("/", " ").replace(".", " ")))] == []


def test_nothing_tells_to_install_corolla_from_a_registry() -> None:
    """Its name there is not the project's, so readers would install what somebody else has put there."""
    places = [path for path in [*texts(), *PACKAGE.rglob("*.py")] if "tests" not in path.relative_to(ROOT).parts]
    told = re.compile(r"pip install\b[^`\n]*\bcorolla\b")
    assert [identify(path) for path in places if told.search(path.read_text(encoding="utf-8"))] == []
