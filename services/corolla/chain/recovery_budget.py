"""What follows from a failure, and when a request has had too many of them. Pure: times are passed in."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from corolla.chassis.errors import (
    CorollaError,
    HopLate,
    HopLeaving,
    HopSessionLost,
    HopUnavailable,
    NonFiniteOutput,
    NotComputed,
    OutOfMemory,
    OutOfPages,
    OutputsNotKept,
    PositionGap,
    RequestKillsServers,
    RouteUnknown,
    StepFailed,
)
from corolla.planning.numerics import MovedBlocks
from corolla.wire.span import Span

RECOVERABLE: Final = (
    HopUnavailable, HopLeaving, HopSessionLost, PositionGap, NonFiniteOutput, StepFailed, OutOfMemory
)  # fmt: skip
"""Failures after which the same step may succeed on other servers, or on the same ones."""


class Action(Enum):
    """What a recovery does about a failure before its next attempt."""

    REPLACE = "replace"
    """The server died, or cannot be reached: others take its place until it is back."""
    REPLACE_FOR_GOOD = "replace for good"
    """The server computed nothing of use: it gets this request no more."""
    REPLACE_EITHER = "replace either"
    """A hop could not reach another one, which is alive: replace the other one, the second time the first one."""
    REPLACE_HERE = "replace here"
    """The server is late: its standby takes this session, and other sessions keep the server."""
    FOLLOW = "follow"
    """The server hands its sessions over; the recovery waits for that."""
    FILL = "fill"
    """The same hops get what they lack."""
    FILL_IN_PLACE = "fill in place"
    """The same hops get what they lack in the sessions that they have, since scratch sessions have no room."""
    GIVE_UP = "give up"
    """Neither these servers nor others would help."""


def classify(failure: CorollaError, *, is_alive: bool = False) -> Action:
    """Says what to do about a failure. `is_alive`: this process reaches the hop that another one could not reach."""
    match failure:
        case HopLate():
            return Action.REPLACE_HERE
        case HopUnavailable():
            return Action.REPLACE_EITHER if failure.reporter and is_alive else Action.REPLACE
        case NotComputed():
            return Action.REPLACE_FOR_GOOD
        case HopLeaving():
            return Action.FOLLOW
        case OutOfPages():
            return Action.FILL_IN_PLACE
        case HopSessionLost() | PositionGap() | OutputsNotKept():
            return Action.FILL
    return Action.GIVE_UP


CAUSES: Final = ("idle", *(each.reason.lower() for each in (*RECOVERABLE, HopLate, RouteUnknown)))
"""Why a recovery was needed: hops had forgotten an idle session (`idle`), or a step failed with the named error."""

METHODS: Final = ("outputs", "outputs+tokens", "reopen", "tokens")
"""How hops got the tokens that they lacked: from boundary activations, from tokens, or not at all (`reopen`)."""

MAX_DEATHS: Final = 2
"""How many deaths of servers at the same step end the request."""

MAX_REPLAY_DEATHS: Final = 4
"""How many deaths of servers during replays end the request. This is more than MAX_DEATHS, since other servers have
already survived the tokens of a replay."""


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """One recovery: one of CAUSES and of METHODS, and the seconds from the failure until the session could continue.

    `num_recomputed_tokens` counts a token once for each hop that processed it again; `moved` is empty where the same
    servers continued. `mixes_numerics`: tokens that follow may differ from those of an undisturbed answer, since a hop
    was replaced by a server of other numerics.
    """

    cause: str
    method: str
    seconds: float
    num_recomputed_tokens: int
    moved: tuple[MovedBlocks, ...] = ()
    mixes_numerics: bool = False


@dataclass(slots=True)
class RecoveryBudget:
    """Bounds the recoveries of one request: it may make `max_recoveries` attempts; 0 allows none.

    `on_recovery` is called for each recovery that succeeded. `until_s` is the time at which the request's caller stops
    waiting.
    """

    max_recoveries: int
    on_recovery: Callable[[RecoveryReport], None] = lambda report: None
    until_s: float = math.inf
    num_attempts: int = 0
    _num_not_computed: int = 0
    # The blocks of each server that died since the request's position last moved.
    _deaths: list[Span] = field(default_factory=list)
    # The addresses of hops that reported, since the position last moved, that they could not reach another hop.
    _reporters: set[str] = field(default_factory=set)
    _position: int = -1
    _num_replay_deaths: int = 0

    @property
    def may_hedge(self) -> bool:
        """A session may leave a late hop. Half of the attempts are kept for hops that are lost."""
        return self.num_attempts < self.max_recoveries // 2

    def spend(
        self,
        action: Action,
        failure: CorollaError,
        position: int,
        died: Sequence[Span] = (),
        *,
        in_replay: bool = False,
    ) -> bool:
        """Counts a failure at the step at `position`. Raises where the request has had enough.

        Servers that leave in an orderly way cost no attempt, however many of them leave during one answer.

        Args:
            died: the blocks of the servers that died.
            in_replay: whether it happened during a replay.

        Returns:
            True if the hop that reported the failure is to blame: replacing the hop that it could not reach did not
            help or was not possible at this position, so the reporter itself may be cut off.

        Raises:
            RequestKillsServers: servers with overlapping blocks died at the same step, or too many in replays.
            CorollaError: the failure, if nothing is left to try: no attempt, or two hops had no output, so that no
                single hop is at fault.
        """
        if action is Action.GIVE_UP:
            raise failure
        if action is not Action.FOLLOW:
            if self.num_attempts >= self.max_recoveries:
                raise failure
            self.num_attempts += 1
        if action is Action.REPLACE_FOR_GOOD:
            self._num_not_computed += 1
            if self._num_not_computed > 1:
                raise failure
        if in_replay and died:
            self._num_replay_deaths += len(died)
            if self._num_replay_deaths >= MAX_REPLAY_DEATHS:
                raise _kills()
            return False
        if action in (Action.REPLACE, Action.REPLACE_EITHER) and position != self._position:
            self._position = position
            self._deaths.clear()
            self._reporters.clear()
        for blocks in died:
            self._note_death(blocks)
        return action is Action.REPLACE_EITHER and self._was_noted(getattr(failure, "reporter", ""))

    def _note_death(self, blocks: Span) -> None:
        self._deaths.append(blocks)
        if sum(each.start < blocks.end and blocks.start < each.end for each in self._deaths) >= MAX_DEATHS:
            raise _kills()

    def _was_noted(self, reporter: str) -> bool:
        """Notes that a hop could not reach another one, and returns whether it was noted already."""
        was_noted = reporter in self._reporters
        self._reporters.add(reporter)
        return was_noted

    def patience_s(self, most_s: float, now_s: float) -> float:
        """How long to wait for a server that replaces a lost one: `most_s`, but not beyond `until_s`."""
        return max(0.0, min(most_s, self.until_s - now_s))


def _kills() -> RequestKillsServers:
    return RequestKillsServers("several block servers ended, one after the other, while they processed this request")
