"""The states of a session on a hop are those that docs/architecture.md shows, and one method changes them."""

import ast
import re

from corolla.block_server.hop_session import TRANSITIONS, SessionEvent, SessionState
from tests.architecture.sources import PACKAGE, ROOT, identify, own_modules, walk


def section() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page.partition("## A session on a hop\n")[2].partition("\n## ")[0]


def test_the_table_of_the_docs_is_the_table_of_the_code() -> None:
    head, _, *rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in section().splitlines()
        if line.startswith("|")
    ]
    assert head[1:] == [event.value for event in SessionEvent]
    shown = {
        SessionState(state): {
            event: SessionState(following) for event, following in zip(SessionEvent, cells, strict=True) if following
        }
        for state, *cells in rows
    }
    assert shown == TRANSITIONS


def test_the_picture_shows_each_state() -> None:
    _, picture, _ = section().split("```")
    words = re.sub("|".join(event.value for event in SessionEvent), "", picture)
    for state in sorted(SessionState, key=lambda state: -len(state.value)):
        if state is not SessionState.GONE:
            assert state.value in words
            words = words.replace(state.value, "")


def test_one_line_of_the_code_changes_a_state() -> None:
    """It begins with the default of its field."""
    written = [
        identify(path)
        for path in own_modules(PACKAGE / "block_server")
        for node in walk(path)
        if isinstance(node, ast.Attribute) and node.attr == "_state" and isinstance(node.ctx, ast.Store)
    ]
    assert written == ["services/corolla/block_server/hop_session.py"]
