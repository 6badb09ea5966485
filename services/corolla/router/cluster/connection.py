"""Keeps the placement in step with the pods of the block servers, if the router runs with Kubernetes."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.router.cluster.api import (
    ApiUnavailable,
    FailureLog,
    KubernetesApi,
    in_daemon_thread,
    is_in_cluster,
    post,
)
from corolla.router.cluster.events import PodRef
from corolla.router.cluster.pod_recorder import PodRecorder
from corolla.router.cluster.pod_watch import PodWatch, Update
from corolla.router.cluster.pods import PodTable, Withheld, withheld_servers
from corolla.router.intervals import RouterIntervals
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.router.settings import RouterSettings
from corolla.v1 import router_pb2 as pb

log = logging.getLogger(__name__)

_SHORTEST_ROUND_S: Final = 0.05


class ClusterConnection:
    """Connects one router to Kubernetes. If the Kubernetes API fails, routing continues as without Kubernetes.

    Args:
        tasks: A task group for this connection only.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: RouterMetrics,
        settings: RouterSettings,
        intervals: RouterIntervals,
        tasks: TaskGroup,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._settings = settings
        self._intervals = intervals
        self._tasks = tasks
        # A mark in the store withholds a server for this long; each round repeats the marks well before they end.
        self._mark_ms = max(settings.lease_ms, round(3000 * intervals.relist_s))
        self._pods = PodTable()
        self._has_news = asyncio.Event()
        self._failure: Exception | None = None
        self._rosters: list[Roster] = []
        self._local_models: set[str] = set()
        # The servers withheld in the last round, by model.
        self._withheld: dict[str, Mapping[str, Withheld]] = {}
        self._recorder: PodRecorder | None = None
        self._failures = FailureLog()

    async def run(self) -> None:
        """Runs for ever; returns if no Kubernetes API can be used. Raises unexpected exceptions of the watch."""
        settings = self._settings
        kubeconfig = "" if settings.kubernetes == "auto" else settings.kubernetes
        if settings.kubernetes == "off" or not (kubeconfig or is_in_cluster()):
            log.info("not using the Kubernetes API; relying on the heartbeats of block servers")
            return
        try:
            api = await in_daemon_thread(
                lambda: KubernetesApi(
                    kubeconfig, settings.pod_selector, self._metrics, self._intervals.kubernetes_answer_s
                )
            )
        except ApiUnavailable as failure:
            self._failures.about("watch", failure)
            return
        loop = asyncio.get_running_loop()
        watch = PodWatch(
            api,
            self._intervals.list_pods_s,
            tell=lambda update: post(loop, lambda: self._learn(update)),
            complain=lambda failure: post(loop, lambda: self._failures.about("watch", failure)),
            fail=lambda failure: post(loop, lambda: self._watch_failed(failure)),
            after_forbidden_s=self._intervals.after_forbidden_s,
        )
        own_pod = PodRef(settings.pod_name, settings.pod_uid)
        self._recorder = PodRecorder(
            api, self._registry, own_pod, self._failures,
            after_failures_s=self._intervals.after_failures_s, lead_ms=2 * self._mark_ms,
        )  # fmt: skip
        watch.start()
        try:
            self._tasks.start_restartable(partial(self._write, self._recorder), "pod_tags")
            while True:
                with contextlib.suppress(CorollaError):
                    await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._intervals.relist_s):
                        await self._has_news.wait()
                self._has_news.clear()
                if self._failure is not None:
                    bug, self._failure = self._failure, None
                    raise bug
                await asyncio.sleep(_SHORTEST_ROUND_S)
        finally:
            watch.stop()
            await self._tasks.close()

    def deregistered(self, pod_uid: str, farewell: pb.DeregisterServerRequest) -> None:
        """Notes that a block server in this pod has left, and what happened to its sessions."""
        if self._recorder is not None and pod_uid in self._pods:
            pod = self._pods[pod_uid]
            self._recorder.deregistered(
                PodRef(pod.name, pod.uid), farewell.num_moved_sessions, farewell.num_left_sessions
            )

    def _learn(self, update: Update) -> None:
        update(self._pods)
        self._metrics.pod_watch_up.set(self._pods.is_current)
        self._has_news.set()

    def _watch_failed(self, failure: Exception) -> None:
        self._failure = failure
        self._has_news.set()

    async def _round(self) -> None:
        """Marks in the store servers that their pods keep from new sessions. Marks end unless a round repeats them."""
        # The pods are read before the rosters: a model counts as local only by a roster that is newer than its pods.
        uids = {pod.uid for pod in self._pods}
        rosters = [roster async for roster in self._registry.rosters()]
        self._rosters = rosters
        self._local_models = {
            each.model for each in rosters if any(server.server.pod_uid in uids for server in each.servers)
        }
        for roster in rosters:
            before = self._withheld.get(roster.model, {})
            now = withheld_servers(roster.servers, self._pods)
            self._withheld[roster.model] = now
            for server_id, reason in now.items():
                if before.get(server_id) is not reason:
                    log.info(
                        "the pod of a block server is leaving or not ready", extra={"server": server_id, "pod": reason}
                    )
                await self._registry.withhold(roster.model, server_id, reason, self._mark_ms)
            for server_id in before.keys() - now.keys():
                await self._registry.withhold(roster.model, server_id, "", self._mark_ms)

    async def _write(self, recorder: PodRecorder) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(CorollaError):
                await recorder.look(self._rosters, self._local_models, self._pods, clock)
            await asyncio.sleep(self._intervals.relist_s)
