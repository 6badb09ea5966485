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
    NotComputed,
    OutOfMemory,
    PositionGap,
    RequestKillsServers,
    RouteUnknown,
    StepFailed,
)
from corolla.v1 import common_pb2
from corolla.wire.span import Span

RECOVERABLE: Final = (
    HopUnavailable, HopLeaving, HopSessionLost, PositionGap, NonFiniteOutput, StepFailed, OutOfMemory
)  # fmt: skip
"""Failures that other servers, or the same ones once more, may make good."""

CAUSES: Final = ("idle", *(each.reason.lower() for each in (*RECOVERABLE, RouteUnknown)))
"""Labels of what happened: hops had forgotten an idle session, or a step failed."""

METHODS: Final = ("outputs", "outputs+tokens", "reopen", "tokens")
"""Labels of how hops are filled, if they have to be."""

MAX_DEATHS: Final = 2
"""Servers that may die of the same step before it is no longer tried."""

MAX_REPLAY_DEATHS: Final = 4
"""Servers that may die while they get a request's past, which others have borne. More than that is no chance."""


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """A run of blocks that went from one server to another one; both by their ids."""

    blocks: Span
    lost: str
    found: str


def moved_blocks(before: common_pb2.Chain, after: common_pb2.Chain) -> tuple[MovedBlocks, ...]:
    """The longest runs that went from the same server to the same one, in order. Both chains cover the same blocks."""
    return tuple(
        MovedBlocks(Span(max(lost.span.start, found.span.start), end), lost.server_id, found.server_id)
        for lost in before.hops
        for found in after.hops
        if lost.server_id != found.server_id
        and max(lost.span.start, found.span.start) < (end := min(lost.span.end, found.span.end))
    )


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One recovery: one of CAUSES and of METHODS, and the seconds from the failure until the session could continue.

    `num_recomputed_tokens` counts tokens that hops processed again for each hop; `moved` is empty where the same
    servers continued.
    """

    cause: str
    method: str
    seconds: float
    num_recomputed_tokens: int
    moved: tuple[MovedBlocks, ...] = ()


@dataclass(slots=True)
class RecoveryBudget:
    """Bounds the recoveries of one request: `max_recoveries` attempts, 0 for none.

    `on_recovery` is called for each recovery that succeeded; nobody waits for the answer after `until_s`.
    """

    max_recoveries: int
    on_recovery: Callable[[RecoveryReport], None] = lambda report: None
    until_s: float = math.inf
    num_attempts: int = 0
    _num_not_computed: int = 0
    # Blocks of servers that died since the request last got further.
    _deaths: list[Span] = field(default_factory=list)
    # Hops that could not reach the next one since then.
    _reporters: set[str] = field(default_factory=set)
    _position: int = -1
    _num_replay_deaths: int = 0

    def take_attempt(self, failure: CorollaError) -> None:
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

    def on_death_in_replay(self) -> None:
        """A server died before it held what the request's next step needs. Raises RequestKillsServers after several."""
        self._num_replay_deaths += 1
        if self._num_replay_deaths >= MAX_REPLAY_DEATHS:
            raise _kills()

    def on_death(self, blocks: Span, position: int) -> None:
        """A server of these blocks died while the request's step at `position` was under way.

        Raises RequestKillsServers where it was not the first one for the same step.
        """
        self._reset_after_progress(position)
        self._deaths.append(blocks)
        num_same = sum(1 for each in self._deaths if each.start < blocks.end and blocks.start < each.end)
        if num_same >= MAX_DEATHS:
            raise _kills()

    def on_unreachable(self, reporter: str, position: int) -> bool:
        """A hop could not reach another one, which lives. Returns whether it reported so before for this `position`.

        Then the other one was replaced in vain, or could not be replaced: it may be the reporter that is cut off.
        """
        self._reset_after_progress(position)
        is_repeated = reporter in self._reporters
        self._reporters.add(reporter)
        return is_repeated

    def _reset_after_progress(self, position: int) -> None:
        if position != self._position:
            self._position = position
            self._deaths.clear()
            self._reporters.clear()

    def on_not_computed(self, failure: NotComputed) -> None:
        """A hop had no output. Raises `failure` at the second time: then it is not the hop's fault."""
        self._num_not_computed += 1
        if self._num_not_computed > 1:
            raise failure


def _kills() -> RequestKillsServers:
    return RequestKillsServers("block servers died one after the other while they processed this request")
