"""`make code-lines` counts rooms, and compares them with the table of the last release."""

from pathlib import Path

from tools.code_lines import PAGE, Size, comparison, rows_of, size_of, sizes_of

MODULE = '''"""A module's docstring,
of two lines."""

import os  # A comment behind code.

# A comment of its own.
NAMES = """one
two"""
"""The docstring of an attribute."""


def first(
    names: list[str],
) -> str:
    """The first name."""

    return names[0]  # fmt: skip
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert size_of(MODULE) == Size(modules=1, lines=17, code=7)


def test_rooms_are_folders_and_generated_modules_do_not_count(tmp_path: Path) -> None:
    for name in ("__init__.py", "wire/frames.py", "wire/inner/codes.py", "v1/written.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("X = 1\n\n", encoding="utf-8")
    assert sizes_of(tmp_path, (tmp_path / "v1",)) == {"corolla": Size(1, 2, 1), "wire": Size(2, 4, 2)}


def test_a_room_that_is_new_or_gone_is_compared_with_nothing() -> None:
    page = "| room | modules | lines | code |\n| old | 2 | 1,200 | 900 |\n| all | 2 | 1,200 | 900 |"
    lines = [" ".join(line.split()) for line in comparison({"new": Size(1, 10, 5)}, rows_of(page))]
    assert lines[1:] == [
        "new 1 (+1) 10 (+10) 5 (+5)",
        "old 0 (-2) 0 (-1,200) 0 (-900)",
        "all 1 (-1) 10 (-1,190) 5 (-895)",
    ]


def test_the_page_has_the_table() -> None:
    assert "block_server" in rows_of(PAGE.read_text(encoding="utf-8"))
