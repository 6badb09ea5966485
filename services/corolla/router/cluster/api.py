"""The part of the Kubernetes API that the router uses. No other module imports the package `kubernetes`.

Answers are read as plain JSON, because the package's models refuse answers of older and newer clusters.
"""

import asyncio
import contextlib
import datetime
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from corolla.chassis.threads import begun_apart
from corolla.router.cluster.events import ClusterEvent, PodRef
from corolla.router.cluster.labels import Patch
from corolla.router.cluster.pods import Pod, read_pod
from corolla.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S: Final = 3.0
_COMPONENT: Final = "corolla-router"
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})
_MISSING: Final = 404
_EXPIRED: Final = 410
_MISSED: Final = {
    "watch": "cannot watch pods; relying on the heartbeats of block servers",
    "patch": "cannot label pods",
    "event": "cannot record Events",
}


def is_in_cluster(account: Path = ACCOUNT) -> bool:
    """A process in a cluster has a service account's token and the address of the API.

    Args:
        account: The folder where Kubernetes mounts the service account.
    """
    return "KUBERNETES_SERVICE_HOST" in os.environ and (account / "token").is_file()


class ApiUnavailable(Exception):
    """The API server does not answer, or its answer is not valid; `cause` is for the log. Only this package sees it."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class ApiForbidden(ApiUnavailable):
    """The API server refuses the router's call."""


class KubernetesApi:
    """The pods of one namespace. Methods block: `changes` for its whole duration, the others for some seconds.

    Every failure raises ApiUnavailable, or its subclass ApiForbidden.

    Args:
        kubeconfig: The file with the address of the API server and the namespace; empty: the pod's service account has
            them.
        selector: The label selector of the pods.
        answer_s: How long an answer may take.
    """

    def __init__(self, kubeconfig: str, selector: str, metrics: RouterMetrics, answer_s: float) -> None:
        self.selector = selector
        self._metrics = metrics
        self._answer_s = answer_s
        self._raw: dict[str, Any] = {"_preload_content": False, "_request_timeout": (_CONNECT_S, answer_s)}
        with _translated():
            # This import takes a second and 40 MB, so it happens only if the API is used.
            from kubernetes import client, config, watch

            settings = client.Configuration()
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
                _, context = config.list_kube_config_contexts(kubeconfig)
                self.namespace = str(context["context"].get("namespace", "default"))
            else:
                config.load_incluster_config(client_configuration=settings)
                self.namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            # The callers of this class retry at their own intervals.
            settings.retries = False
            # The methods return responses of urllib3, which the package's annotations do not say.
            self._core: Any = client.CoreV1Api(client.ApiClient(settings))
            self._event_type = client.CoreV1Event
            self._watch = watch.Watch(return_type="object")

    def pods(self) -> tuple[list[Pod], str]:
        """Returns all pods, and the version from which to watch them."""
        with self._called("list"):
            listed = json.loads(
                self._core.list_namespaced_pod(self.namespace, label_selector=self.selector, **self._raw).data
            )
            pods = map(read_pod, listed["items"])
            return [each for each in pods if each is not None], str(listed["metadata"]["resourceVersion"])

    def changes(self, version: str, for_s: int) -> Iterator[tuple[str, Pod]]:
        """Yields (ADDED, MODIFIED or DELETED, pod) for each change since `version`.

        The changes end after `for_s`, after `stop`, or when the server no longer knows the version. Then the caller
        lists the pods anew.
        """
        with self._called("watch"):
            stream = self._watch.stream(
                self._core.list_namespaced_pod,
                self.namespace,
                label_selector=self.selector,
                resource_version=version,
                timeout_seconds=for_s,
                _request_timeout=(_CONNECT_S, for_s + self._answer_s),
            )
            try:
                for event in stream:
                    pod = read_pod(event["raw_object"])
                    if event["type"] in _CHANGES and pod is not None:
                        yield event["type"], pod
                    elif event["type"] != "BOOKMARK":
                        raise ApiUnavailable("NoPod")
            except Exception as failure:
                if _status(failure) != _EXPIRED:
                    raise

    def stop(self) -> None:
        """Ends the watch that runs in another thread."""
        self._watch.stop()

    def patch(self, patch: Patch) -> None:
        """Changes a pod; does nothing if the pod has gone."""
        with self._called("patch"):
            try:
                self._core.patch_namespaced_pod(
                    patch.name,
                    self.namespace,
                    dict(patch.body),
                    _content_type="application/merge-patch+json",
                    **self._raw,
                ).drain_conn()
            except Exception as failure:
                if _status(failure) != _MISSING:
                    raise

    def record(self, event: ClusterEvent, own_pod: PodRef) -> None:
        """Writes an Event about the pod that it names, or else about the router's own pod."""
        with self._called("event"):
            described = _event(event, event.about or own_pod, own_pod, self.namespace)
            filled = self._event_type.model_validate(described)
            self._core.create_namespaced_event(self.namespace, filled, **self._raw).drain_conn()

    @contextmanager
    def _called(self, call: str) -> Iterator[None]:
        outcome = "ok"
        try:
            with _translated():
                yield
        except ApiUnavailable as failure:
            outcome = "forbidden" if isinstance(failure, ApiForbidden) else "failed"
            raise
        finally:
            self._metrics.kubernetes_calls.labels(call, outcome).inc()


@contextmanager
def _translated() -> Iterator[None]:
    """Converts exceptions of the package, of its transport and of invalid answers to ApiUnavailable or ApiForbidden."""
    try:
        yield
    except ApiUnavailable:
        raise
    except Exception as failure:
        kind = ApiForbidden if _status(failure) in (401, 403) else ApiUnavailable
        raise kind(type(failure).__name__) from None


def _status(failure: Exception) -> int | None:
    """Returns the HTTP status of a failure, if the server answered with one."""
    status = getattr(failure, "status", None)
    return status if isinstance(status, int) else None


def _event(event: ClusterEvent, about: PodRef, own_pod: PodRef, namespace: str) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"generateName": f"{about.name}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": about.name, "uid": about.uid,
        },
        "reason": event.reason,
        "message": event.message,
        "type": "Warning" if event.is_warning else "Normal",
        "source": {"component": _COMPONENT, "host": own_pod.name},
        "reportingComponent": _COMPONENT,
        "reportingInstance": own_pod.name,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }  # fmt: skip


class FailureLog:
    """Logs, for each kind of call, when failures begin or change their type, and when calls succeed again."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[ApiUnavailable]] = {}

    def about(self, call: str, failure: ApiUnavailable | None) -> None:
        """Notes that a call has failed with `failure`, or has succeeded (None)."""
        if failure is None:
            if self._kinds.pop(call, None) is not None:
                log.info("kubernetes is back", extra={"call": call})
        elif self._kinds.get(call) is not type(failure):
            self._kinds[call] = type(failure)
            facts = {"call": call, "reason": type(failure).__name__, "cause": failure.cause}
            log.warning(f"kubernetes: {_MISSED[call]}", extra=facts)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a daemon thread, and returns its result or raises its exception.

    If the caller is cancelled, the thread still runs to its end.
    """
    return await asyncio.wrap_future(begun_apart(work))


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Makes the loop run `call`, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
