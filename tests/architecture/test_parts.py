"""The tables of parts are true: a part names every part whose attributes its builder reads."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE

ROOTS = {"block_server": "BlockServer", "client": "ClientService", "router": "RouterProcess"}


@dataclass
class Builder:
    """The attributes of `self` that a method reads and sets, with those of the methods that it names."""

    reads: set[str] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)

    def follow(self, node: ast.AST, methods: dict[str, ast.AST], seen: set[str]) -> "Builder":
        for each in ast.walk(node):
            if not (isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"):
                continue
            if each.attr in methods:
                if each.attr not in seen:
                    seen.add(each.attr)
                    self.follow(methods[each.attr], methods, seen)
            elif isinstance(each.ctx, ast.Store):
                self.sets.add(each.attr)
            else:
                self.reads.add(each.attr)
        return self


def untold(source: str, class_name: str) -> list[str]:
    """What builders read of other parts that their own part does not need, by whatever way."""
    [root] = [
        each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.ClassDef) and each.name == class_name
    ]
    methods: dict[str, ast.AST] = {
        each.name: each
        for each in root.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name != "__init__"
    }
    calls = [
        each
        for each in ast.walk(root)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "Part"
    ]
    assert len(calls) > 5
    owners: dict[str, str] = {}
    reached: dict[str, set[str]] = {}
    found = []
    for call in calls:
        stops = [each.value for each in call.keywords if each.arg == "stop"]
        name, *rest = call.args
        name = ast.literal_eval(name)
        needs = ast.literal_eval(rest[1]) if len(rest) > 1 else []
        reached[name] = {name, *needs}.union(*(reached[need] for need in needs))
        # A part without a builder is what its stop frees.
        builder = Builder().follow(rest[0] if rest else stops[0], methods, set())
        for attribute in builder.sets if rest else builder.reads:
            owners.setdefault(attribute, name)
        found += [
            f"{name} reads {attribute} of {owners[attribute]}"
            for attribute in sorted(builder.reads)
            if owners.get(attribute, name) not in reached[name]
        ]
    return found


@pytest.mark.parametrize("room", ROOTS)
def test_a_part_needs_what_its_builder_reads(room: str) -> None:
    assert untold((PACKAGE / room / "service.py").read_text(encoding="utf-8"), ROOTS[room]) == []


def test_a_forgotten_need_is_found() -> None:
    source = Path(PACKAGE / "router" / "service.py").read_text(encoding="utf-8")
    lie = source.replace('self._keep_placement, ["redis", "tasks"]', 'self._keep_placement, ["redis"]')
    assert lie != source
    assert untold(lie, "RouterProcess") == ["placement reads _tasks of tasks"]
