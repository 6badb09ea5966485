"""The audit log: who asked for what, and its outcome. One JSON line each; never a text, an answer or a session id."""

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

LOGGER: Final = "corolla.audit"

_log = logging.getLogger(LOGGER)


class Caller(Protocol):
    """Somebody who was asked who they are."""

    def audited(self) -> Mapping[str, str]:
        """What the audit log says of them."""


class Anybody:
    """Who calls where nobody is asked."""

    def audited(self) -> Mapping[str, str]:
        return {}


ANYBODY: Final = Anybody()


def write(event: str, facts: Mapping[str, Any]) -> None:
    """Writes a line, if there is an audit log."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(event, extra=dict(facts))
