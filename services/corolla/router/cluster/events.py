"""Decides what to report as an Event of Kubernetes, and when: a flapping span must not flood the namespace. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.wire.span import Span

_SETTLE_S: Final = 3.0
"""A state is reported after it has lasted this long. A store that has lost its data knows all servers again by then."""
_SHORTEST_PAUSE_S: Final = 10.0
_LONGEST_PAUSE_S: Final = 600.0
_HANDOVER_PAUSE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class PodRef:
    """The pod that an Event is about."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """An Event to write. It is about the pod `about`, or, without one, about the router's own pod."""

    reason: str
    message: str
    is_warning: bool
    about: PodRef | None = None


@dataclass(slots=True)
class _Coverage:
    """The uncovered blocks of one model: those reported last, and those seen now."""

    reported: tuple[Span, ...]
    seen: tuple[Span, ...]
    seen_since_s: float
    reported_s: float | None = None
    pause_s: float = _SHORTEST_PAUSE_S
    num_changes: int = 0


class CoverageReporter:
    """Reports when blocks of a model lose their last ready server, and when they have one again.

    A state is reported once it has lasted for a moment, and a pause has passed since the last report. The pause doubles
    with each Event, and is short again once nothing has changed for its length. The state at the first look is not
    reported: another router has reported it, or a new release is loading.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Coverage] = {}

    def look(self, model: str, uncovered: Sequence[Span], now_s: float) -> ClusterEvent | None:
        """Returns the Event to write now, if any."""
        gaps = tuple(uncovered)
        state = self._models.setdefault(model, _Coverage(gaps, gaps, now_s))
        if gaps != state.seen:
            state.seen, state.seen_since_s = gaps, now_s
            state.num_changes += 1
        if state.reported_s is not None and now_s - max(state.reported_s, state.seen_since_s) >= state.pause_s:
            state.pause_s = _SHORTEST_PAUSE_S
        is_settled = now_s - state.seen_since_s >= _SETTLE_S
        may_tell = state.reported_s is None or now_s - state.reported_s >= state.pause_s
        if state.seen == state.reported or not is_settled or not may_tell:
            return None
        event = _event_of(model, state)
        if state.reported_s is not None:
            state.pause_s = min(2 * state.pause_s, _LONGEST_PAUSE_S)
        state.reported, state.reported_s, state.num_changes = state.seen, now_s, 0
        return event

    def forget(self, models: Collection[str]) -> None:
        """Forgets all models except these."""
        for model in self._models.keys() - set(models):
            del self._models[model]


def _event_of(model: str, state: _Coverage) -> ClusterEvent:
    flapping = f" ({state.num_changes} changes since the last Event)" if state.num_changes > 1 else ""
    if not state.seen:
        return ClusterEvent("SpanRestored", f"all blocks of {model} have a ready block server{flapping}", False)
    listed = ", ".join(map(str, state.seen))
    return ClusterEvent("SpanUncovered", f"blocks {listed} of {model} have no ready block server{flapping}", True)


@dataclass(slots=True)
class _Drained:
    num_moved: int = 0
    num_left: int = 0
    reported_s: float | None = None


@dataclass(slots=True)
class DrainReporter:
    """Reports what happened to the sessions of block servers that left, added up for each pod over a minute."""

    _pods: dict[PodRef, _Drained] = field(default_factory=dict)

    def note(self, pod: PodRef, num_moved: int, num_left: int) -> None:
        """Notes that a server in this pod has left."""
        drained = self._pods.setdefault(pod, _Drained())
        drained.num_moved += num_moved
        drained.num_left += num_left

    def due(self, now_s: float) -> list[ClusterEvent]:
        """Returns the Events to write now."""
        events = []
        for pod, drained in list(self._pods.items()):
            is_old = drained.reported_s is not None and now_s - drained.reported_s >= _HANDOVER_PAUSE_S
            if drained.num_moved + drained.num_left == 0:
                if is_old or drained.reported_s is None:
                    del self._pods[pod]
            elif drained.reported_s is None or is_old:
                left = f"; left, and to be recomputed: {drained.num_left}" if drained.num_left else ""
                message = f"sessions that other block servers have taken over: {drained.num_moved}{left}"
                events.append(ClusterEvent("SessionsHandedOver", message, bool(drained.num_left), pod))
                self._pods[pod] = _Drained(reported_s=now_s)
        return events
