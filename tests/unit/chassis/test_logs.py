"""Log lines: one a line, whatever the facts hold."""

import json
import logging
from collections.abc import Iterator

import pytest

from corolla.chassis import audit, logs
from corolla.chassis.errors import SettingsError
from corolla.chassis.settings import ServiceSettings, load

HOSTILE = "a\nERROR fake=1\x1b[31m\u2028b"


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    loggers = (logging.getLogger(), logging.getLogger(audit.LOGGER))
    before = [(each.level, each.handlers[:], each.propagate) for each in loggers]
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:], logger.propagate = handlers, propagate


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_fact_makes_a_line_of_its_own(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", log_format)
    logging.getLogger("x").info("it happened", extra={"address": HOSTILE})
    logging.getLogger("x").info("it happened to %s", HOSTILE)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(each.isprintable() for each in lines)


def test_each_fact_of_a_text_line_is_quoted_where_needed(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("INFO", "text")
    logging.getLogger("x").info("it happened", extra={"host": "a b=c", "port": 5, "name_of": "größe"})
    line = capsys.readouterr().err
    assert 'host="a b=c" port=5 name_of=größe' in line


def test_the_audit_log_is_json_whatever_the_format_and_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("ERROR", "text", with_audit=True)
    audit.write("call", {"tenant": HOSTILE, "num": 3})
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line).items() >= {"event": "call", "logger": audit.LOGGER, "tenant": HOSTILE, "num": 3}.items()


def test_the_audit_log_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("DEBUG", "json", with_audit=False)
    audit.write("call", {"tenant": "t"})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("written", ["debug", "Debug", "DEBUG"])
def test_a_level_may_be_written_in_any_case(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(ServiceSettings, log_level=written).log_level == "DEBUG"
    monkeypatch.setenv("COROLLA_LOG_LEVEL", written)
    assert load(ServiceSettings).log_level == "DEBUG"


def test_a_level_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="COROLLA_LOG_LEVEL='LOUD'"):
        load(ServiceSettings, log_level="loud")
