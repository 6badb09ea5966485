"""Pods as the API server describes them, and servers as a roster lists them."""

from typing import Any

from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

CREATED, STARTED, LATER = "2026-11-21T10:00:00Z", "2026-11-21T10:00:05Z", "2026-11-21T10:07:00Z"


def described_pod(
    uid: str,
    *,
    deleted: bool = False,
    ready: str | None = "True",
    containers_ready: str = "",
    since: str = LATER,
    started: str | None = STARTED,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    phase: str = "Running",
) -> dict[str, Any]:
    """A pod of one container."""
    metadata: dict[str, Any] = {"uid": uid, "name": f"pod-{uid}", "labels": labels or {}}
    if annotations is not None:
        metadata["annotations"] = annotations
    if deleted:
        metadata["deletionTimestamp"] = LATER
    state = {"running": {"startedAt": started}} if started else {"waiting": {"reason": "CrashLoopBackOff"}}
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": CREATED}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": ready, "lastTransitionTime": since})
    if containers_ready:
        conditions.append({"type": "ContainersReady", "status": containers_ready, "lastTransitionTime": since})
    return {
        "metadata": metadata,
        "status": {"phase": phase, "conditions": conditions, "containerStatuses": [{"state": state}]},
    }


def placed(name: str, span: str, **facts: Any) -> pb.PlacedServer:
    """A ready server in the pod `uid-<name>`."""
    blocks = Span.parse(span)
    return pb.PlacedServer(
        server=pb.ServerDescription(
            server_id=name, fingerprint=facts.pop("fingerprint", "f"), pod_uid=facts.pop("pod_uid", f"uid-{name}")
        ),
        span=common_pb2.BlockSpan(start=blocks.start, end=blocks.end),
        state=facts.pop("state", pb.SERVER_STATE_READY),
        load=pb.ServerLoad(num_sessions=facts.pop("num_sessions", 0)),
    )
