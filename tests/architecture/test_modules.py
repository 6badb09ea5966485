"""Modules are nouns, and no checkpoint brings its own code."""

import ast
from pathlib import Path

from tests.architecture.sources import PACKAGE, ROOT, identify, own_modules, walk

EMPTY_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}


def test_modules_are_named_for_their_contents() -> None:
    modules = own_modules(PACKAGE, ROOT / "benchmarks", ROOT / "tests")
    assert [
        identify(each) for each in modules if not EMPTY_NAMES.isdisjoint(Path(identify(each)).with_suffix("").parts)
    ] == []


def test_no_checkpoint_brings_its_own_code() -> None:
    unguarded = [
        f"{identify(path)}:{node.value.lineno}"
        for path in own_modules(PACKAGE)
        for node in walk(path)
        if isinstance(node, ast.keyword)
        and node.arg == "trust_remote_code"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert unguarded == []
