"""What a list of pods means for the block servers in them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from corolla.v1 import router_pb2 as pb

SPAN_LABEL: Final = "corolla.dev/span"
COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"

_MOST_GONE: Final = 4096
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class Withheld(StrEnum):
    """Why a server that says it is ready should not get sessions."""

    LEAVING = "leaving"
    """Its pod is being deleted or has ended: there is no way back."""
    UNREADY = "unready"
    """Its pod is not ready: others come first."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the API server last showed it. `span` and `cost` are the label and the annotation that it has."""

    uid: str
    name: str
    is_leaving: bool = False
    is_unready: bool = False
    span: str | None = None
    cost: str | None = None


def read_pod(described: Any) -> Pod | None:
    """A pod from its JSON; None if that is not one."""
    metadata = _mapping(described, "metadata")
    uid, name = metadata.get("uid"), metadata.get("name")
    if not (isinstance(uid, str) and isinstance(name, str) and uid and name):
        return None
    status = _mapping(described, "status")
    return Pod(
        uid,
        name,
        is_leaving=bool(metadata.get("deletionTimestamp")) or status.get("phase") in _ENDED,
        is_unready=_is_unready(status),
        span=_mapping(metadata, "labels").get(SPAN_LABEL),
        cost=_mapping(metadata, "annotations").get(COST_ANNOTATION),
    )


def _is_unready(status: Mapping[str, Any]) -> bool:
    """Whether the pod has lost its readiness, or a readiness gate keeps it back.

    A pod that has not been ready yet may just not have been probed: what its server says is newer.
    """
    conditions = {each.get("type"): each for each in _mappings(status, "conditions")}
    ready = conditions.get("Ready")
    if ready is None or ready.get("status") == "True":
        return False
    if conditions.get("ContainersReady", {}).get("status") == "True":
        return True
    started = [
        _mapping(_mapping(each, "state"), "running").get("startedAt") for each in _mappings(status, "containerStatuses")
    ]
    # Times of one form, in UTC and whole seconds, compare as texts do.
    return all(str(ready.get("lastTransitionTime", "")) > since for since in started if isinstance(since, str))


class PodTable:
    """The pods that a selector chooses, as lists and watched changes tell.

    A pod that was there and is no more counts as leaving: its server may live until its lease ends. One that was never
    seen says nothing: it may be another release's.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._gone: dict[str, None] = {}
        self.is_current = False
        """Whether the API server tells of changes now."""

    def __iter__(self) -> Iterator[Pod]:
        return iter(self._pods.values())

    def __getitem__(self, uid: str) -> Pod:
        return self._pods[uid]

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def listed(self, pods: Iterable[Pod]) -> None:
        """All that there are."""
        now = {each.uid: each for each in pods}
        for uid in self._pods.keys() - now.keys():
            self._note_gone(uid)
        for uid in now:
            self._gone.pop(uid, None)
        self._pods = now
        self.is_current = True

    def changed(self, pod: Pod) -> None:
        """One is new, or another than before."""
        self._gone.pop(pod.uid, None)
        self._pods[pod.uid] = pod

    def deleted(self, pod: Pod) -> None:
        """One is gone, or is no longer chosen."""
        self._pods.pop(pod.uid, None)
        self._note_gone(pod.uid)

    def lost(self) -> None:
        """Nothing more is heard: what can change may have changed."""
        self.is_current = False

    def withheld(self, uid: str) -> Withheld | None:
        """What is known of a pod speaks against its server, or nothing does."""
        pod = self._pods.get(uid)
        if uid in self._gone or (pod is not None and pod.is_leaving):
            return Withheld.LEAVING
        if pod is not None and pod.is_unready and self.is_current:
            return Withheld.UNREADY
        return None

    def _note_gone(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]


def withheld_servers(servers: Iterable[pb.PlacedServer], table: PodTable) -> dict[str, Withheld]:
    """The servers, by id, that their pods speak against. Servers outside of Kubernetes have no pod."""
    reasons = {each.server.server_id: table.withheld(each.server.pod_uid) for each in servers if each.server.pod_uid}
    return {server_id: reason for server_id, reason in reasons.items() if reason is not None}


def _mapping(holder: Any, key: str) -> Mapping[str, Any]:
    found = holder.get(key) if isinstance(holder, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _mappings(holder: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    found = holder.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
