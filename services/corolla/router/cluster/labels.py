"""Computes the tags of pods: the span of the block server, and the cost of losing it. Pure.

When a pool shrinks, the ReplicaSet deletes the pod with the lowest `pod-deletion-cost` first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from corolla.router.cluster.pods import COST_ANNOTATION, SPAN_LABEL, Pod, PodTable
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

_SETTLE_S: Final = 1.0
"""A tag is written once it has been wanted for this long."""
_FORGET_S: Final = 15.0
"""The tags of a pod without a server are removed after this time. A store that has lost its data knows all servers
again well before."""
_PAUSE_S: Final = 5.0
"""The pause between two patches of one pod."""
_LOAD_PAUSE_S: Final = 60.0
"""The pause between two patches of one pod if only its number of sessions has changed."""

_SESSIONS_DIGIT: Final = 10
"""How many times the usefulness of a server counts in its cost; the last digit stands for the number of sessions."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The label and the annotation of one pod; None: the pod has no such label or annotation."""

    span: str | None
    cost: str | None


@dataclass(frozen=True, slots=True)
class Patch:
    """A change of one pod, as a JSON merge patch."""

    uid: str
    name: str
    body: Mapping[str, Any]


def span_label(span: Span) -> str:
    """Returns the span as the value of a label, which may not contain a colon."""
    return f"{span.start}-{span.end}"


def deletion_cost(placed: pb.PlacedServer, copies: Counter[tuple[str, int]]) -> int:
    """Returns the `pod-deletion-cost` of a server: high if few ready servers hold its scarcest block.

    Each block that this server alone holds adds to the cost. The server's sessions add to it, too, but count least.

    Args:
        copies: The number of ready servers that hold a block, by fingerprint and block.
    """
    if placed.state != pb.SERVER_STATE_READY:
        return 0
    span = Span.from_message(placed.span)
    held = [copies[placed.server.fingerprint, block] for block in range(span.start, span.end)]
    usefulness = 100 // min(held) + held.count(1)
    return _SESSIONS_DIGIT * usefulness + min(placed.load.num_sessions.bit_length(), _SESSIONS_DIGIT - 1)


def wanted_tags(servers: Sequence[pb.PlacedServer]) -> dict[str, Tags]:
    """Returns the tags that the pods of one model's servers should have, by the pods' UIDs."""
    copies = Counter(
        (each.server.fingerprint, block)
        for each in servers
        if each.state == pb.SERVER_STATE_READY
        for block in range(each.span.start, each.span.end)
    )
    return {
        each.server.pod_uid: Tags(span_label(Span.from_message(each.span)), str(deletion_cost(each, copies)))
        for each in servers
        if each.server.pod_uid
    }


@dataclass(slots=True)
class _DesiredTags:
    tags: Tags
    since_s: float


class TagPlan:
    """Decides which pods to patch now, with as few patches as possible."""

    def __init__(self) -> None:
        self._desired: dict[str, _DesiredTags] = {}
        self._patched_s: dict[str, float] = {}

    def due(self, pods: PodTable, wanted: Mapping[str, Tags], now_s: float) -> list[Patch]:
        """Returns the patches to try now; pods without wanted tags lose theirs."""
        present = {each.uid for each in pods}
        for memory in (self._desired, self._patched_s):
            for uid in memory.keys() - present:
                del memory[uid]
        return [patch for pod in pods if (patch := self._patch(pod, wanted.get(pod.uid), now_s)) is not None]

    def _patch(self, pod: Pod, wanted: Tags | None, now_s: float) -> Patch | None:
        tags = wanted or Tags(None, None)
        has = Tags(pod.span, pod.cost)
        desired = self._desired.get(pod.uid)
        if desired is None or _differs(desired.tags, tags):
            desired = self._desired[pod.uid] = _DesiredTags(tags, now_s)
        desired.tags = tags
        settle_s = _SETTLE_S if wanted else _FORGET_S
        pause_s = _PAUSE_S if _differs(has, tags) else _LOAD_PAUSE_S
        is_too_soon = now_s - desired.since_s < settle_s or now_s - self._patched_s.get(pod.uid, -pause_s) < pause_s
        if has == tags or pod.is_leaving or pod.has_ended or is_too_soon:
            return None
        self._patched_s[pod.uid] = now_s
        return Patch(pod.uid, pod.name, _merge_patch(has, tags))


def _differs(one: Tags, other: Tags) -> bool:
    """Tags that differ in the number of sessions only count as equal."""
    return one.span != other.span or _usefulness(one.cost) != _usefulness(other.cost)


def _usefulness(cost: str | None) -> int | None:
    # Another program may have annotated the pod.
    is_number = cost is not None and cost.isascii() and cost.isdigit() and len(cost) < 12
    return int(cost) // _SESSIONS_DIGIT if cost is not None and is_number else None


def _merge_patch(has: Tags, tags: Tags) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if has.span != tags.span:
        metadata["labels"] = {SPAN_LABEL: tags.span}
    if has.cost != tags.cost:
        metadata["annotations"] = {COST_ANNOTATION: tags.cost}
    return {"metadata": metadata}
