"""What one request has gone through, and when it is enough. Pure: times are passed in."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from corolla.chassis.errors import (
    CorollaError,
    HopLeaving,
    HopSessionLost,
    HopUnavailable,
    NonFiniteOutput,
    PositionGap,
    RequestKillsServers,
)
from corolla.wire.span import Span

MENDABLE: Final = (HopUnavailable, HopLeaving, HopSessionLost, PositionGap, NonFiniteOutput)
"""Failures that other servers, or the same ones once more, may make good."""

CAUSES: Final = ("idle", *(each.reason.lower() for each in MENDABLE))
"""Labels of what happened: hops had forgotten an idle session, or a step failed."""

METHODS: Final = ("outputs", "outputs+tokens", "reopen", "tokens")
"""Labels of how hops are filled, if they have to be."""

MAX_DEATHS: Final = 2
"""Servers that may die of the same step before it is no longer tried."""

MAX_REPLAY_DEATHS: Final = 4
"""Servers that may die while they get a request's past, which others have borne. More than that is no chance."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """One recovery.

    Attributes:
        cause: one of CAUSES.
        method: one of METHODS.
        seconds: from the failure until the session could go on.
        num_recomputed_tokens: tokens that hops processed again, counted for each hop.
    """

    cause: str
    method: str
    seconds: float
    num_recomputed_tokens: int


@dataclass(slots=True)
class RecoveryAccount:
    """Bounds the recoveries of one request.

    Args:
        max_recoveries: attempts of the request; 0 for none.
        on_recovered: is told of each recovery that succeeded.
        until_s: when nobody waits for the answer any more.
    """

    max_recoveries: int
    on_recovered: Callable[[Recovered], None] = lambda recovered: None
    until_s: float = math.inf
    num_attempts: int = 0
    _num_non_finite: int = 0
    # Blocks of servers that died since the request last got further.
    _deaths: list[Span] = field(default_factory=list)
    # Hops that could not reach the next one since then.
    _reporters: set[str] = field(default_factory=set)
    _position: int = -1
    _num_replay_deaths: int = 0

    def begin(self, failure: CorollaError) -> None:
        """One more attempt. Raises `failure` when there were enough.

        However many servers leave while an answer lasts, that is no failure of theirs.
        """
        if isinstance(failure, HopLeaving):
            return
        if self.num_attempts >= self.max_recoveries:
            raise failure
        self.num_attempts += 1

    def patience_s(self, most_s: float, now_s: float) -> float:
        """How long to wait for a replacement: `most_s`, but not beyond the request's own time."""
        return max(0.0, min(most_s, self.until_s - now_s))

    def recovered(self, recovered: Recovered) -> None:
        self.on_recovered(recovered)

    def died_in_replay(self) -> None:
        """A server died before it held what the request's next step needs. Raises RequestKillsServers after several."""
        self._num_replay_deaths += 1
        if self._num_replay_deaths >= MAX_REPLAY_DEATHS:
            raise _kills()

    def died(self, blocks: Span, position: int) -> None:
        """A server of these blocks died while the request's step at `position` was under way.

        Raises:
            RequestKillsServers: it was not the first one for the same step.
        """
        self._take_stock(position)
        self._deaths.append(blocks)
        num_same = sum(1 for each in self._deaths if each.start < blocks.end and blocks.start < each.end)
        if num_same >= MAX_DEATHS:
            raise _kills()

    def cut_off(self, reporter: str, position: int) -> bool:
        """A hop could not reach another one, which lives. Whether it said so before of the step at `position`.

        Then the other one was replaced in vain, or could not be replaced: it may be the reporter that is cut off.
        """
        self._take_stock(position)
        has_said_so = reporter in self._reporters
        self._reporters.add(reporter)
        return has_said_so

    def _take_stock(self, position: int) -> None:
        if position != self._position:
            self._position = position
            self._deaths.clear()
            self._reporters.clear()

    def non_finite(self, failure: NonFiniteOutput) -> None:
        """A hop's output was no number. Raises `failure` at the second time: then it is not the hop's fault."""
        self._num_non_finite += 1
        if self._num_non_finite > 1:
            raise failure


def _kills() -> RequestKillsServers:
    return RequestKillsServers("block servers died one after the other while they processed this request")
