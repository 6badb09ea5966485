"""Tests see of an object what its users see, and plant faults where it takes something from outside.

A private name may change with every line of its module. A test that reads one breaks for no reason, and one that
replaces it may go on without the fault that it meant to plant. `tests/simulation/mutants.py` replaces what it likes:
a mistake in the code is its subject.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.sources import ROOT, identify, own_modules, walk

TESTS: Final = ROOT / "tests"
# Private names of libraries that have no public way to the same, and each one's reason.
ALLOWED: Final[dict[tuple[str, str], str]] = {
    ("tests/charts/test_monitoring.py", "_collector_to_names"): "prometheus_client tells the names of samples only",
    ("tests/charts/test_monitoring.py", "_labelnames"): "prometheus_client tells labels only of samples that exist",
    ("tests/gpu_double.py", "_local_scalar_dense"): "the name of an operator of torch",
    ("tests/gpu_double.py", "_to_copy"): "the name of an operator of torch",
    ("tests/gpu_double.py", "_schema"): "torch tells only there which arguments an operator changes",
    ("tests/gpu_double.py", "_make_wrapper_subclass"): "torch makes a tensor without memory in no other way",
    ("tests/gpu_double.py", "_C"): "torch takes its calls of CUDA from there",
    ("tests/gpu_double.py", "_dispatch_has_kernel_for_dispatch_key"): "torch tells only there what is made of others",
    ("tests/gpu_double.py", "_only_lift_cpu_tensors"): "otherwise torch itself brings numbers of Python to a device",
    (
        "tests/gpu_double.py",
        "_set_only_lift_cpu_tensors",
    ): "otherwise torch itself brings numbers of Python to a device",
    ("tests/gpu_double.py", "_host_emptyCache"): "torch's build for processors lacks it",
    ("tests/integration/router/test_outages.py", "_writer"): "redis resets no connection on request",
    ("tests/llama_cpp/converter.py", "_set_vocab_gpt2"): "llama.cpp's converter has no public way to choose it",
    (
        "tests/mtp_models.py",
        "_keys_to_ignore_on_load_unexpected",
    ): "transformers finds the tensors of a block that drafts by it",
    ("tests/recorded_steps.py", "_local_scalar_dense"): "the name of an operator of torch",
    ("tests/simulation/loop.py", "_scheduled"): "asyncio counts its timers in their handles",
    ("tests/simulation/loop.py", "_context"): "asyncio runs a handle in the context of who made it",
    ("tests/simulation/loop.py", "_run"): "asyncio has no other way to run a handle",
    ("tests/triton_kernels/ordered_products.py", "_patch_lang"): "Triton's interpreter calls it for each function",
    (
        "tests/unit/models/test_chunked_reads.py",
        "_keep_in_fp32_modules",
    ): "transformers tells nowhere else what stays float32",
    ("tests/unit/models/test_chunked_reads.py", "_keep_in_fp32_modules_strict"): "and in bfloat16, too",
}
_BY_NAME: Final = frozenset({"setattr", "getattr", "hasattr", "delattr", "setitem", "object", "patch", "attrgetter"})
"""Calls that get an attribute's name as a string: of Python, of pytest's monkeypatch and of unittest.mock."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_own(owner: ast.expr) -> bool:
    """Whether it is the object or the class itself that looks."""
    if isinstance(owner, ast.Call):
        return isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def private_names(node: ast.AST) -> Iterator[str]:
    """Names that the node reaches for in something else."""
    if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names if is_private(alias.name))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _BY_NAME:
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            yield from (part for text in texts for part in text.split(".")[-1:] if is_private(part))


def reached(path: Path) -> list[tuple[int, str]]:
    """Line and name of each private name that a module reaches for."""
    return [(getattr(node, "lineno", 0), name) for node in walk(path) for name in private_names(node)]


def test_tests_touch_no_private_name_of_another_object_but_those_that_are_allowed() -> None:
    touched = {(identify(path), name): line for path in own_modules(TESTS) for line, name in reached(path)}
    assert [f"{path}:{line}: {name}" for (path, name), line in touched.items() if (path, name) not in ALLOWED] == []
    assert touched.keys() == ALLOWED.keys(), "some that are allowed are needed no longer"


@pytest.mark.parametrize(
    "code, names",
    [
        ("server._engine.run()", ["_engine"]),
        ("self._engine", []),
        ("self.server._engine", ["_engine"]),
        ("super()._run()", []),
        ("task.__name__", []),
        ("from corolla.router.api import _ANSWER_S", ["_ANSWER_S"]),
        ("monkeypatch.setattr(BlockServicer, '_write', held)", ["_write"]),
        ("monkeypatch.setattr('corolla.router.api._ANSWER_S', 1.0)", ["_ANSWER_S"]),
        ("getattr(swarm.clients[0], '_plane')", ["_plane"]),
        ("monkeypatch.setattr(Engine, 'submit', held)", []),
        ("print('_plane')", []),
    ],
)
def test_a_private_name_is_found(code: str, names: list[str]) -> None:
    assert [name for node in ast.walk(ast.parse(code)) for name in private_names(node)] == names
