"""The audit log: one JSON line for each call, with its caller and outcome; never a text, an answer or a session id."""

import logging
from collections.abc import Mapping
from typing import Any, Final, Protocol

LOGGER: Final = "corolla.audit"

_log = logging.getLogger(LOGGER)


class Caller(Protocol):
    """A caller whose identity the service has checked."""

    def audited(self) -> Mapping[str, str]:
        """Returns the facts about the caller that the audit log records."""


class AnonymousCaller:
    """The caller of a service that does not authenticate its callers."""

    def audited(self) -> Mapping[str, str]:
        return {}


ANONYMOUS_CALLER: Final = AnonymousCaller()


def write(event: str, facts: Mapping[str, Any]) -> None:
    """Writes a line if the audit log is on."""
    if _log.isEnabledFor(logging.INFO):
        _log.info(event, extra=dict(facts))
