"""Modules are nouns, and load weights and code from nowhere unsafe."""

import ast
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT, identify, own_modules, walk

EMPTY_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("torch.hub", "load")}

own = pytest.mark.parametrize("path", own_modules(PACKAGE), ids=identify)


@pytest.mark.parametrize("path", own_modules(PACKAGE, ROOT / "benchmarks", ROOT / "tests"), ids=identify)
def test_modules_are_named_for_their_contents(path: Path) -> None:
    assert EMPTY_NAMES.isdisjoint(path.relative_to(ROOT).with_suffix("").parts)


@own
def test_nothing_is_validated_by_assert(path: Path) -> None:
    assert [node.lineno for node in walk(path) if isinstance(node, ast.Assert)] == []


@own
def test_nothing_is_unpickled(path: Path) -> None:
    imported: set[str] = set()
    called: set[tuple[str, str]] = set()
    for node in walk(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported.add(node.module.partition(".")[0])
            called |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called.add((ast.unparse(node.func.value), node.func.attr))
    assert imported.isdisjoint(UNSAFE_MODULES)
    assert called.isdisjoint(UNSAFE_CALLS)


@own
def test_no_checkpoint_brings_its_own_code(path: Path) -> None:
    trusting = [
        node.value.lineno
        for node in walk(path)
        if isinstance(node, ast.keyword)
        and node.arg == "trust_remote_code"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert trusting == []


@own
def test_nothing_is_printed_past_the_log(path: Path) -> None:
    printed = [
        node.lineno
        for node in walk(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printed == []
