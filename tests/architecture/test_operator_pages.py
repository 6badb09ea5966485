"""The pages for operators name metrics, settings and errors that exist, and have a section for each alert."""

import re
from pathlib import Path

import pytest
import yaml

from corolla.chassis import errors, failpoints

ROOT = Path(__file__).parents[2]
PAGES = ("reliability.md", "runbook.md")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_metrics_exist(name: str) -> None:
    named = set(re.findall(r"`(corolla_\w+)", page(name)))
    assert named <= set(re.findall(r"`(corolla_\w+)`", page("metrics.md")))


@pytest.mark.parametrize("name", PAGES)
def test_settings_exist(name: str) -> None:
    named = set(re.findall(r"COROLLA_\w+", page(name)))
    assert named
    assert named <= {*re.findall(r"COROLLA_\w+", page("configuration.md")), failpoints.VARIABLE}


@pytest.mark.parametrize("name", PAGES)
def test_reasons_exist(name: str) -> None:
    tree = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.CorollaError)]
    reasons = {each.reason for each in tree} | {str(each.code.name) for each in tree}
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", re.sub(r"COROLLA_\w+", "", page(name))))
    assert named <= reasons


def test_each_alert_has_its_section() -> None:
    rules = yaml.safe_load((ROOT / "charts/corolla/alerts.yaml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert alerts <= set(re.findall(r"^## (\w+)$", page("runbook.md"), re.MULTILINE))


def test_the_rows_of_faults_stand_in_the_table() -> None:
    rows = re.findall(
        r'^    "(\w+)": \(', (ROOT / "tests/faults/__main__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert rows
    for row in rows:
        assert re.search(rf"\| `{row}[ `]", page("reliability.md")), row
