"""Published models, made small, answer as transformers does, and the page's table says what holds for each."""

from pathlib import Path

import pytest

from tests.published import PUBLISHED, Row, table_lines
from tests.tiers import quick

# A wrapper's states and experts, and another family's code.
CASES = quick([each.name for each in PUBLISHED], "Qwen3.5-397B-A17B", "Kimi-K2-Instruct")
BY_NAME = {each.name: each for each in PUBLISHED}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_of_single_blocks_answers_as_the_unsplit_model(tmp_path: Path, name: str) -> None:
    row = Row(BY_NAME[name], tmp_path)
    assert row.line() in table_lines(), "python -m tests.published"
    if row.refusal is None:
        answer = row.answer()
        assert answer == row.unsplit()
        assert len(set(answer)) > 2


def test_the_table_has_each_published_model_once() -> None:
    assert [line.split(" | ")[0] for line in table_lines()] == [f"| {each.name}" for each in PUBLISHED]
