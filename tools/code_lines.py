"""Says how many lines the services have, room by room, and how many more than at the last release.

    python tools/code_lines.py            prints what has changed since the release, whose table is in docs/testing.md
    python tools/code_lines.py --table    prints the rows that the page has from the next release on

A room is a folder of `services/corolla`. Generated modules are left out. A line of code is neither blank nor only a
comment or a docstring. The numbers forbid nothing: they show where the services grow.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = ROOT / "services" / "corolla"
PAGE: Final = ROOT / "docs" / "testing.md"
GENERATED: Final = (PACKAGE / "v1", PACKAGE / "sdk" / "client.py")
"""What `make protos` and `make sync-client` write."""
TOP: Final = "corolla"
"""The room of the modules that stand in no folder of the package."""
ALL: Final = "all"
"""The row of all rooms together."""

_ROW: Final = re.compile(r"^\| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)
_NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


class Size(NamedTuple):
    """How large a room is."""

    modules: int = 0
    lines: int = 0
    code: int = 0

    def plus(self, other: Self) -> "Size":
        return Size(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def size_of(source: str) -> Size:
    """Counts one module."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone is a docstring.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return Size(1, len(source.splitlines()), len(code))


def sizes_of(package: Path, generated: tuple[Path, ...] = ()) -> dict[str, Size]:
    """Counts each room of a package."""
    rooms: dict[str, Size] = {}
    for path in sorted(package.rglob("*.py")):
        if not any(path.is_relative_to(place) for place in generated):
            place = path.relative_to(package).parts
            room = place[0] if len(place) > 1 else TOP
            rooms[room] = rooms.get(room, Size()).plus(size_of(path.read_text(encoding="utf-8")))
    return rooms


def rows_of(page: str) -> dict[str, Size]:
    """Reads the rooms of the last release from the table of a page."""
    rows = {room: Size(*(int(each.replace(",", "")) for each in sizes)) for room, *sizes in _ROW.findall(page)}
    rows.pop(ALL, None)
    return rows


def with_total(rooms: Mapping[str, Size]) -> list[tuple[str, Size]]:
    """The rooms by name, and behind them all rooms together."""
    total = Size()
    for size in rooms.values():
        total = total.plus(size)
    return [*sorted(rooms.items()), (ALL, total)]


def comparison(now: Mapping[str, Size], before: Mapping[str, Size]) -> list[str]:
    """Gives each room of today or of the last release a line, and one to all together."""
    names = {*now, *before}
    former = with_total({name: before.get(name, Size()) for name in names})
    lines = [f"    {'':14} {'modules':>12} {'lines':>16} {'code':>16}"]
    for (name, size), (_, old) in zip(with_total({name: now.get(name, Size()) for name in names}), former, strict=True):
        modules, all_lines, code = (f"{new:,} ({new - was:+,})" for new, was in zip(size, old, strict=True))
        lines.append(f"    {name:14} {modules:>12} {all_lines:>16} {code:>16}")
    return lines


def main(arguments: list[str]) -> None:
    rooms = sizes_of(PACKAGE, GENERATED)
    if arguments == ["--table"]:
        for room, size in with_total(rooms):
            sys.stdout.write(f"| {room} | {size.modules:,} | {size.lines:,} | {size.code:,} |\n")
    else:
        sys.stdout.write("\n".join(comparison(rooms, rows_of(PAGE.read_text(encoding="utf-8")))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
