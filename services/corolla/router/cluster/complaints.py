"""Says in the log what does not work, once for each way of not working."""

import logging
from typing import Final

from corolla.router.cluster.api import ApiUnavailable

log = logging.getLogger(__name__)

_MISSED: Final = {
    "watch": "pods are not watched; servers are known by their heartbeats alone",
    "patch": "pods are not labelled",
    "event": "no Events are recorded",
}


class Complaints:
    """By kind of call: what was wrong with it last."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[ApiUnavailable]] = {}

    def about(self, call: str, failure: ApiUnavailable | None) -> None:
        """A call has failed, or worked."""
        if failure is None:
            if self._kinds.pop(call, None) is not None:
                log.info("kubernetes is back", extra={"call": call})
        elif self._kinds.get(call) is not type(failure):
            self._kinds[call] = type(failure)
            facts = {"call": call, "reason": type(failure).__name__, "cause": failure.cause}
            log.warning(f"kubernetes: {_MISSED[call]}", extra=facts)
