"""Counts the failures and recoveries of one request, and ends the request after too many. Pure: times are passed in."""

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
"""Failures after which the same step may succeed on other servers, or on the same ones."""

CAUSES: Final = ("idle", *(each.reason.lower() for each in (*RECOVERABLE, RouteUnknown)))
"""Why a recovery was needed: hops had forgotten an idle session (`idle`), or a step failed with the named error."""

METHODS: Final = ("outputs", "outputs+tokens", "reopen", "tokens")
"""How hops got the tokens that they lacked: from boundary activations, from tokens, or not at all (`reopen`)."""

MAX_DEATHS: Final = 2
"""How many deaths of servers at the same step end the request."""

MAX_REPLAY_DEATHS: Final = 4
"""How many deaths of servers during replays end the request. This is more than MAX_DEATHS, since other servers have
already survived the tokens of a replay."""


@dataclass(frozen=True, slots=True)
class MovedBlocks:
    """A run of blocks that went from the server with the id `lost` to the one with the id `found`."""

    blocks: Span
    lost: str
    found: str


def moved_blocks(before: common_pb2.Chain, after: common_pb2.Chain) -> tuple[MovedBlocks, ...]:
    """The runs of blocks that have moved from one server to another, in order, each as long as possible.

    Both chains must cover the same blocks.
    """
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

    def take_attempt(self, failure: CorollaError) -> None:
        """Counts one more attempt. Raises `failure` when `max_recoveries` attempts were made before.

        Servers that leave in an orderly way do not count, however many of them leave during one answer.
        """
        if isinstance(failure, HopLeaving):
            return
        if self.num_attempts >= self.max_recoveries:
            raise failure
        self.num_attempts += 1

    def patience_s(self, most_s: float, now_s: float) -> float:
        """How long to wait for a server that replaces a lost one: `most_s`, but not beyond `until_s`."""
        return max(0.0, min(most_s, self.until_s - now_s))

    def on_death_in_replay(self) -> None:
        """Records that a server died during a replay. Raises RequestKillsServers after MAX_REPLAY_DEATHS of them."""
        self._num_replay_deaths += 1
        if self._num_replay_deaths >= MAX_REPLAY_DEATHS:
            raise _kills()

    def on_death(self, blocks: Span, position: int) -> None:
        """Records that a server of these blocks died while the request's step at `position` was under way.

        Raises RequestKillsServers at the second death for the same step and overlapping blocks.
        """
        self._reset_after_progress(position)
        self._deaths.append(blocks)
        num_same = sum(1 for each in self._deaths if each.start < blocks.end and blocks.start < each.end)
        if num_same >= MAX_DEATHS:
            raise _kills()

    def on_unreachable(self, reporter: str, position: int) -> bool:
        """Records that the hop with the address `reporter` could not reach another hop, although that one is alive.

        Returns whether the same hop reported this before at this `position`. If so, it did not help or was not possible
        to replace the other hop, and the reporter itself may be cut off.
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
        """Records that a hop had no output. Raises `failure` the second time, since no single hop is at fault then."""
        self._num_not_computed += 1
        if self._num_not_computed > 1:
            raise failure


def _kills() -> RequestKillsServers:
    return RequestKillsServers("several block servers ended, one after the other, while they processed this request")
