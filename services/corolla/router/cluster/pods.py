"""Derives from a list of pods which block servers should get no sessions. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from corolla.v1 import router_pb2 as pb

SPAN_LABEL: Final = "corolla.dev/span"
COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"

_MOST_GONE: Final = 4096
_ENDED: Final = frozenset({"Succeeded", "Failed"})


class Withheld(StrEnum):
    """The reason why a server that reports that it is ready should not get sessions."""

    LEAVING = "leaving"
    """The server's pod is being deleted, which cannot be undone."""
    UNREADY = "unready"
    """The server's pod is not ready, so other servers are preferred."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the API server last showed it. `span` and `cost` are its present label and annotation."""

    uid: str
    name: str
    is_leaving: bool = False
    has_ended: bool = False
    is_unready: bool = False
    span: str | None = None
    cost: str | None = None


def read_pod(described: Any) -> Pod | None:
    """Returns the pod that the JSON describes; None if it describes no pod."""
    metadata = _mapping(described, "metadata")
    uid, name = metadata.get("uid"), metadata.get("name")
    if not (isinstance(uid, str) and isinstance(name, str) and uid and name):
        return None
    status = _mapping(described, "status")
    return Pod(
        uid,
        name,
        is_leaving=bool(metadata.get("deletionTimestamp")),
        has_ended=status.get("phase") in _ENDED,
        is_unready=_is_unready(status),
        span=_mapping(metadata, "labels").get(SPAN_LABEL),
        cost=_mapping(metadata, "annotations").get(COST_ANNOTATION),
    )


def _is_unready(status: Mapping[str, Any]) -> bool:
    """The pod has lost its readiness, or a readiness gate is not met.

    A pod that was never ready does not count: it may not have been probed yet, and its server's own report is newer.
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
    # All times are in one form, in UTC and whole seconds, so they can be compared as texts.
    return all(str(ready.get("lastTransitionTime", "")) > since for since in started if isinstance(since, str))


class PodTable:
    """The pods that the label selector matches, as the lists and watched changes show them.

    A pod that was never seen does not count: it may belong to another release.
    """

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}
        self._gone: dict[str, None] = {}
        self.is_current = False
        """The API server reports changes at present."""

    def __iter__(self) -> Iterator[Pod]:
        return iter(self._pods.values())

    def __getitem__(self, uid: str) -> Pod:
        return self._pods[uid]

    def __contains__(self, uid: str) -> bool:
        return uid in self._pods

    def listed(self, pods: Iterable[Pod]) -> None:
        """Replaces all pods by the pods of a new list."""
        now = {each.uid: each for each in pods}
        for uid in self._pods.keys() - now.keys():
            self._note_gone(uid)
        for uid in now:
            self._gone.pop(uid, None)
        self._pods = now
        self.is_current = True

    def changed(self, pod: Pod) -> None:
        """Adds or replaces a pod."""
        self._gone.pop(pod.uid, None)
        self._pods[pod.uid] = pod

    def deleted(self, pod: Pod) -> None:
        """Removes a pod that has gone, or that the selector no longer matches."""
        self._pods.pop(pod.uid, None)
        self._note_gone(pod.uid)

    def lost(self) -> None:
        """Marks the table as not current, because the watch has ended."""
        self.is_current = False

    def has_gone(self, uid: str) -> bool:
        """The pod was seen, and is no more, or its containers have ended, such as on a node that evicted it.

        Its server is lost, unless the pod was deleted by force or has lost its label.
        """
        return uid in self._gone or (uid in self._pods and self._pods[uid].has_ended)

    def withheld(self, uid: str) -> Withheld | None:
        """Returns the reason why the server in this pod should get no sessions; None: there is no reason."""
        pod = self._pods.get(uid)
        if self.has_gone(uid) or (pod is not None and pod.is_leaving):
            return Withheld.LEAVING
        if pod is not None and pod.is_unready and self.is_current:
            return Withheld.UNREADY
        return None

    def _note_gone(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]


def withheld_servers(
    servers: Iterable[pb.PlacedServer], table: PodTable, removed: Collection[str]
) -> dict[str, Withheld]:
    """Returns the reasons of all withheld servers, by server id. Servers outside of Kubernetes are never withheld.

    A server whose pod has gone is removed instead. If it lives on and registers again, it is withheld as one that
    leaves.

    Args:
        removed: The ids of the servers that were removed.
    """
    reasons: dict[str, Withheld] = {}
    for each in servers:
        uid, server_id = each.server.pod_uid, each.server.server_id
        may_be_marked = uid and (server_id in removed or not table.has_gone(uid))
        if may_be_marked and (reason := table.withheld(uid)) is not None:
            reasons[server_id] = reason
    return reasons


def _mapping(holder: Any, key: str) -> Mapping[str, Any]:
    found = holder.get(key) if isinstance(holder, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _mappings(holder: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    found = holder.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
