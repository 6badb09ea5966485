"""The project's own modules, parsed for the rules of this folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ROOT / "services"
PACKAGE = SERVICES / "corolla"
GENERATED = PACKAGE / "v1"


def own_modules(*folders: Path) -> list[Path]:
    """Every module under the folders that a person wrote, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py") if not path.is_relative_to(GENERATED))


def walk(path: Path) -> Iterator[ast.AST]:
    """Every node of the module's syntax tree."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))


def dotted(path: Path) -> str:
    """`services/corolla/wire/span.py` as `corolla.wire.span`."""
    parts = path.relative_to(SERVICES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def identify(path: Path) -> str:
    """How a test names a module."""
    return str(path.relative_to(ROOT))
