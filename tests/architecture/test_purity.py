"""A module whose docstring says "Pure" is handed time and randomness, and holds no tensor, socket or clock."""

import ast
import re
from pathlib import Path
from typing import Final

import grimp

from tests.architecture.sources import PACKAGE, dotted, own_modules

IMPURE: Final = ("asyncio", "grpc", "random", "redis", "socket", "threading", "time", "torch")
ALLOWED: Final = {("corolla.chassis.errors", "grpc")}
"""The error tree names gRPC's codes; that opens no socket."""
_PURE: Final = re.compile(r"(?:^|[.:?!]\s+|\"\"\")Pure[.:]")


def calls_itself_pure(path: Path) -> bool:
    """Whether a sentence of the module's docstring begins with the word: "Pure.", or "Pure: time is passed in."."""
    # No module is parsed in vain: each process of tests asks this of all of them.
    if not _PURE.search(text := path.read_text(encoding="utf-8")):
        return False
    return _PURE.search(ast.get_docstring(ast.parse(text)) or "") is not None


PURE: Final = [path for path in own_modules(PACKAGE) if calls_itself_pure(path)]


def test_modules_that_say_pure_are() -> None:
    imports = grimp.build_graph(
        "corolla", include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    for importer, imported in ALLOWED:
        imports.remove_import(importer=importer, imported=imported)
    ways = [
        imports.find_shortest_chain(importer=dotted(path), imported=each)
        for path in PURE
        for each in IMPURE
        if each in imports.modules
    ]
    assert [" -> ".join(way) for way in ways if way] == []


def test_deciding_modules_say_pure() -> None:
    """Those whose purity the architecture promises; others may come, none of these may lose its mark."""
    names = {dotted(path).removeprefix("corolla.") for path in PURE}
    assert {
        "block_server.scheduler", "block_server.sessions", "decoding.stopping", "planning.planner", "router.placement",
        "router.rebalancing",
    } <= names  # fmt: skip
