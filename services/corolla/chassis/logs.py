"""The format of log lines. A line has one event and its facts, and never a prompt, an answer or a session id."""

import json
import logging
import sys
from typing import Any

from corolla.chassis import audit

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    """Formats a line for people: time, level, event, facts."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:<7} {_escaped(record.getMessage())}"
        return " ".join([line, *(f"{key}={_quoted(value)}" for key, value in _facts(record).items())])


def _escaped(text: str) -> str:
    """Returns the text in one line, without control characters for the terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _quoted(value: object) -> str:
    """Returns a fact's value as text, quoted if it could be read as two facts."""
    text = str(value)
    if text.isprintable() and not any(each in text for each in ' "='):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname, "event": record.getMessage()}
        return json.dumps({**line, "logger": record.name, **_facts(record)}, default=str)


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time: a program that redirected it may have closed the earlier stream."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def configure(level: str, log_format: str, *, with_audit: bool = False) -> None:
    """Sends all log lines to standard error. Lines of the audit log, written if `with_audit`, are always JSON."""
    handler = _StandardError()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "httpcore2", "urllib3", "filelock", "huggingface_hub", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    audit_log = logging.getLogger(audit.LOGGER)
    audit_log.handlers.clear()
    audit_log.propagate = False
    audit_log.setLevel(logging.INFO if with_audit else logging.CRITICAL)
    lines = _StandardError()
    lines.setFormatter(_JsonFormatter())
    audit_log.addHandler(lines)
