"""Every public name with a tensor in its signature says the shape, dtype and device of each.

A parameter or attribute stands in an entry or sentence that has a shape, such as `[rows, hidden]`, or one of
`_PHRASES`; a name is not needed where the signature has one tensor only. For a result, a shape stands outside of
`Args:`. A dtype and a device are named there, or once for all in the docstring of the class or of the module. "See
`Class.method`" stands for the docstring of that method, and an override without a docstring has that of the method of
its base class.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.sources import PACKAGE, identify, own_modules

Function = ast.FunctionDef | ast.AsyncFunctionDef

_TENSOR: Final = re.compile(r"\b(?:Tensor|ndarray|NDArray)\b")
_PHRASES: Final = ("any shape", "same shape", "shapes? of", "unused")
_SHAPE: Final = re.compile(rf"`[^`\[]*(?<!\w)\[[^\[\]`]+\]`|{'|'.join(_PHRASES)}")
_DTYPE: Final = re.compile(r"\b(?:dtypes?|bool|float\d+|bfloat16|u?int\d+|float8\w*|floating point)\b")
_DEVICE: Final = re.compile(r"\b(?:CPU|GPU|devices?)\b")
_SECTION: Final = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_SEE: Final = re.compile(r"\b[Ss]ee `(\w+\.\w+|\w+)`")
_OF_CLASS: Final = ("__init__", "__call__", "forward")
"""Methods that the class's docstring may describe."""


@dataclass(frozen=True)
class Definition:
    """A function, method or attribute, and the docstrings that may describe its tensors."""

    place: str
    parameters: tuple[str, ...]
    has_result: bool
    text: str
    surrounding: str

    @property
    def faults(self) -> list[str]:
        """What its docstrings leave out."""
        passages = list(passages_of(self.text))
        shaped = [(section, words) for section, words in passages if _SHAPE.search(words)]
        is_alone = len(self.parameters) + self.has_result == 1
        missing = [
            f"the shape of {name}"
            for name in self.parameters
            if not any(is_alone or re.search(rf"\b{name}\b", words) for _, words in shaped)
        ]
        if self.has_result and not any(section not in ("Args", "Raises") for section, _ in shaped):
            missing.append("the shape of the result")
        everything = f"{self.text} {self.surrounding}"
        missing += [word for word, form in (("a dtype", _DTYPE), ("a device", _DEVICE)) if not form.search(everything)]
        return missing


def passages_of(docstring: str) -> Iterator[tuple[str, str]]:
    """The entries of a docstring's sections and the sentences outside of these, each with the name of its section."""
    section, entry, sentences = "", "", ""
    for line in [*docstring.splitlines(), ""]:
        is_entry = line.startswith("    ") and section
        if entry and not line.startswith("     "):
            yield section, entry
            entry = ""
        if found := _SECTION.match(line):
            section = found[1]
        elif is_entry:
            entry += " " + line.strip()
        elif line:
            section, sentences = "", f"{sentences} {line}"
    yield from (("", sentence) for sentence in re.split(r"(?<=\.)\s", sentences))


def tensors_of(function: Function) -> tuple[tuple[str, ...], bool]:
    """The names of a function's parameters that are tensors, and whether its result is one."""
    given = function.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return tuple(each.arg for each in parameters if is_tensor(each.annotation)), is_tensor(function.returns)


def is_tensor(annotation: ast.expr | None) -> bool:
    """Whether an annotation mentions a tensor."""
    return annotation is not None and _TENSOR.search(ast.unparse(annotation)) is not None


def is_public(name: str) -> bool:
    """Whether a name is public; `__init__` and its like are."""
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


class Documents:
    """The docstrings of the project's functions, methods and classes, by `name` and `Class.name`."""

    def __init__(self, trees: dict[Path, ast.Module]) -> None:
        self._trees = trees
        self._texts: dict[str, str] = {}
        for tree in trees.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._texts[node.name] = ast.get_docstring(node) or ""
                    for method in node.body:
                        if isinstance(method, Function):
                            self._texts.setdefault(f"{node.name}.{method.name}", ast.get_docstring(method) or "")
                elif isinstance(node, Function):
                    self._texts[node.name] = ast.get_docstring(node) or ""

    def with_references(self, text: str) -> str:
        """A docstring, and those that it refers to."""
        return "\n".join([text, *(self._texts.get(name, "") for name in _SEE.findall(text))])

    def definitions(self) -> Iterator[Definition]:
        """Every public definition that has a tensor in its signature."""
        for path, tree in self._trees.items():
            module = ast.get_docstring(tree) or ""
            yield from self._in_body(tree.body, identify(path), module, None)

    def _in_body(
        self, body: list[ast.stmt], place: str, around: str, owner: ast.ClassDef | None
    ) -> Iterator[Definition]:
        own = "" if owner is None else ast.get_docstring(owner) or ""
        for number, node in enumerate(body):
            if isinstance(node, ast.ClassDef) and is_public(node.name):
                yield from self._in_body(node.body, f"{place}:{node.name}", around, node)
            elif isinstance(node, Function) and is_public(node.name):
                parameters, has_result = tensors_of(node)
                if (parameters or has_result) and "overload" not in map(ast.unparse, node.decorator_list):
                    text = ast.get_docstring(node) or self._inherited(owner, node.name)
                    text += "\n\n" + own if node.name in _OF_CLASS else ""
                    yield Definition(
                        f"{place}:{node.name}", parameters, has_result, self.with_references(text), own + around
                    )
            elif isinstance(node, ast.AnnAssign) and owner and is_tensor(node.annotation):
                name = ast.unparse(node.target)
                if is_public(name):
                    text = f"{own}\n\n{name}: {string_after(body, number)}"
                    yield Definition(f"{place}:{name}", (name,), False, text, around)

    def _inherited(self, owner: ast.ClassDef | None, name: str) -> str:
        """The docstring of the base class's method."""
        bases = [] if owner is None else [ast.unparse(base) for base in owner.bases]
        return "".join(self._texts.get(f"{base}.{name}", "") for base in bases)


def string_after(body: list[ast.stmt], number: int) -> str:
    """The docstring below an attribute."""
    following = body[number + 1] if number + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return str(following.value.value)
    return ""


def definitions_of(trees: dict[Path, ast.Module]) -> list[Definition]:
    return list(Documents(trees).definitions())


def public_modules() -> dict[Path, ast.Module]:
    """The syntax trees of the package's public modules."""
    paths = [path for path in own_modules(PACKAGE) if all(map(is_public, path.with_suffix("").parts))]
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_public_names_say_the_shape_dtype_and_device_of_each_tensor() -> None:
    definitions = definitions_of(public_modules())
    assert len(definitions) > 100, "the test finds no tensors"
    odd = [f"{each.place}: {', '.join(each.faults)}" for each in definitions if each.faults]
    assert odd == [], "\n".join([f"{len(odd)} of {len(definitions)}:", *odd])


@pytest.mark.parametrize(
    "docstring, faults",
    [
        ("Adds `left`, `[N]`, to `right`, `[N]`; returns float32 `[N]` on the CPU.", []),
        ("Adds two.", ["the shape of left", "the shape of right", "the shape of the result", "a dtype", "a device"]),
        (
            "Adds two.\n\nArgs:\n    left: float32 `[N]` on the CPU.\n    right: likewise.",
            ["the shape of right", "the shape of the result"],
        ),
        ("See `other`.", []),
    ],
)
def test_a_missing_shape_dtype_and_device_is_found(docstring: str, faults: list[str]) -> None:
    other = "Adds `left` and `right`, float32 `[N]` on the CPU each, to `[N]`."
    signature = "left: Tensor, right: Tensor) -> Tensor:"
    code = f"def add({signature}\n    {docstring!r}\ndef other({signature}\n    {other!r}\n"
    found, _ = definitions_of({PACKAGE / "module.py": ast.parse(code)})
    assert found.faults == faults
