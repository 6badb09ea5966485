"""Keeps the placement in step with the pods of the block servers, if the router runs with Kubernetes."""

import asyncio
import collections
import contextlib
import logging
import random
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final

from corolla.chassis.breaker import Breaker
from corolla.chassis.errors import CorollaError
from corolla.chassis.tasks import TaskGroup
from corolla.router.cluster.api import (
    ApiForbidden,
    ApiUnavailable,
    FailureLog,
    KubernetesApi,
    in_daemon_thread,
    is_in_cluster,
    post,
)
from corolla.router.cluster.events import ClusterEvent, CoverageReporter, DrainReporter, PodRef
from corolla.router.cluster.labels import Patch, TagPlan, wanted_tags
from corolla.router.cluster.pods import Pod, PodTable, Withheld, withheld_servers
from corolla.router.intervals import RouterIntervals
from corolla.router.metrics import RouterMetrics
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.router.settings import RouterSettings
from corolla.v1 import router_pb2 as pb

log = logging.getLogger(__name__)


Update = Callable[[PodTable], None]
"""A change of the table of pods, which the table's owner applies."""

_SHORTEST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


@dataclass(eq=False, repr=False)
class PodWatch:
    """Reports every list and every change of the pods, by functions that its thread calls.

    Args:
        relist_interval_s: The time after which a watch ends and the pods are listed anew, in case it missed a change.
        tell: A function that is called with each change of the table.
        complain: A function that is called with each failure, and with None after a success.
        fail: A function that is called when an unexpected exception ends the thread.
        after_forbidden_s: The pause after the API server has forbidden to list pods.
    """

    api: KubernetesApi
    relist_interval_s: float
    tell: Callable[[Update], None]
    complain: Callable[[ApiUnavailable | None], None]
    fail: Callable[[Exception], None]
    _: KW_ONLY
    after_forbidden_s: float
    _stopping: threading.Event = field(init=False, default_factory=threading.Event)
    _num_failures: int = field(init=False, default=0)

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod watch", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()
        self.api.stop()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._look()
                pause_s = _SHORTEST_PAUSE_S
            except ApiUnavailable as failure:
                if self._stopping.is_set():
                    return
                self._num_failures += 1
                self.tell(PodTable.lost)
                self.complain(failure)
                pause_s = self._rest_s(failure)
            except Exception as failure:
                # The table must not count as current for ever.
                self.tell(PodTable.lost)
                self.fail(failure)
                return
            self._stopping.wait(pause_s)

    def _look(self) -> None:
        """Reads one list, and the changes after it."""
        pods, version = self.api.pods()
        self.tell(lambda table: table.listed(pods))
        for kind, pod in self.api.changes(version, max(1, round(self.relist_interval_s))):
            if self._stopping.is_set():
                return
            self._all_is_well()
            self.tell(_update(kind, pod))
        self._all_is_well()

    def _all_is_well(self) -> None:
        self._num_failures = 0
        self.complain(None)

    def _rest_s(self, failure: ApiUnavailable) -> float:
        if isinstance(failure, ApiForbidden):
            return self.after_forbidden_s
        pause_s = min(_SHORTEST_PAUSE_S * 2.0 ** min(self._num_failures - 1, 10), _LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


def _update(kind: str, pod: Pod) -> Update:
    return lambda table: table.deleted(pod) if kind == "DELETED" else table.changed(pod)


_MOST_FAILURES: Final = 3
_MOST_WAITING_EVENTS: Final = 100


@dataclass(eq=False, repr=False)
class PodRecorder:
    """Writes tags and Events to Kubernetes. All routers see the same states, and only the leading router writes them.

    A server that leaves reports the fate of its sessions to one router only, and that router writes the Event.

    Args:
        registry: The placement in the store, by which routers elect the leading one.
        own_pod: The pod of this router; without its name, no Events about spans are written.
        after_failures_s: The pause after several failed writes.
        lead_ms: The time after which another router leads if this one is silent.

    Attributes:
        leads: Whether this router was the leading one when it looked last.
    """

    api: KubernetesApi
    registry: Registry
    own_pod: PodRef
    failures: FailureLog
    _: KW_ONLY
    after_failures_s: float
    lead_ms: int
    leads: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._router_id = secrets.token_hex(8)
        self._tags = TagPlan()
        self._spans = CoverageReporter()
        self._handovers = DrainReporter()
        self._models: set[str] = set()
        self._waiting: collections.deque[ClusterEvent] = collections.deque(maxlen=_MOST_WAITING_EVENTS)
        self._breakers = {call: Breaker(_MOST_FAILURES, self.after_failures_s) for call in ("patch", "event")}

    def deregistered(self, pod: PodRef, num_moved: int, num_left: int) -> None:
        """Notes that a block server has left, and what happened to its sessions."""
        self._handovers.note(pod, num_moved, num_left)

    async def look(
        self, rosters: Sequence[Roster], local_models: Collection[str], pods: PodTable, clock: Callable[[], float]
    ) -> None:
        """Writes what is due. Raises StoreUnavailable when the store cannot name the leading router.

        Args:
            local_models: The models that have a server in one of the pods.
        """
        # This call comes first, since it may fail: the reporters below count as written what they return.
        self.leads = await self.registry.lead(
            f"pods:{self.api.namespace}:{self.api.selector}", self._router_id, self.lead_ms
        )
        now_s = clock()
        # Releases in other namespaces may share the store; their own routers report on their models.
        self._models |= set(local_models)
        self._models &= {each.model for each in rosters}
        self._spans.forget(self._models)
        own = [each for each in rosters if each.model in self._models and each.is_known]
        seen = [self._spans.look(each.model, each.uncovered, now_s) for each in own]
        self._waiting.extend(self._handovers.due(now_s))
        if self.leads and self.own_pod.name:
            self._waiting.extend(each for each in seen if each is not None)
        if self.leads and pods.is_current:
            wanted = {uid: tags for each in rosters for uid, tags in wanted_tags(each.servers).items()}
            await self._patch(self._tags.due(pods, wanted, now_s), clock)
        await self._record(clock)

    async def _patch(self, patches: Iterable[Patch], clock: Callable[[], float]) -> None:
        for patch in patches:
            # After a failure the next pod is tried, since the reason may apply to one pod only.
            await self._try("patch", partial(self.api.patch, patch), clock)

    async def _record(self, clock: Callable[[], float]) -> None:
        while self._waiting:
            if not await self._try("event", partial(self.api.record, self._waiting[0], self.own_pod), clock):
                self._waiting.rotate(-1)
                return
            self._waiting.popleft()

    async def _try(self, call: str, work: Callable[[], None], clock: Callable[[], float]) -> bool:
        breaker = self._breakers[call]
        if not breaker.admits(clock()):
            return False
        try:
            await in_daemon_thread(work)
        except ApiUnavailable as failure:
            breaker.failed(clock())
            self.failures.about(call, failure)
            return False
        breaker.succeeded()
        self.failures.about(call, None)
        return True


_SHORTEST_ROUND_S: Final = 0.05
_MOST_REMOVED: Final = 4096
"""After so many removed servers, the oldest ones are past remembering."""


@dataclass(eq=False, repr=False)
class ClusterConnection:
    """Connects one router to Kubernetes. If the Kubernetes API fails, routing continues as without Kubernetes.

    Args:
        tasks: A task group for this connection only.
    """

    registry: Registry
    metrics: RouterMetrics
    settings: RouterSettings
    intervals: RouterIntervals
    tasks: TaskGroup
    _mark_ms: int = field(init=False)
    _pods: PodTable = field(init=False, default_factory=PodTable)
    _has_news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _failure: Exception | None = field(init=False, default=None)
    _rosters: list[Roster] = field(init=False, default_factory=list)
    _local_models: set[str] = field(init=False, default_factory=set)
    # The servers withheld in the last round, by model.
    _withheld: dict[str, Mapping[str, Withheld]] = field(init=False, default_factory=dict)
    # The servers that were removed since their pods have gone.
    _removed: set[str] = field(init=False, default_factory=set)
    _recorder: PodRecorder | None = field(init=False, default=None)
    _failures: FailureLog = field(init=False, default_factory=FailureLog)

    def __post_init__(self) -> None:
        # A mark in the store withholds a server for this long; each round repeats the marks well before they end.
        self._mark_ms = max(self.settings.lease_ms, round(3000 * self.intervals.relist_s))

    async def run(self) -> None:
        """Runs for ever; returns if no Kubernetes API can be used. Raises unexpected exceptions of the watch."""
        settings = self.settings
        kubeconfig = "" if settings.kubernetes == "auto" else settings.kubernetes
        if settings.kubernetes == "off" or not (kubeconfig or is_in_cluster()):
            log.info("not using the Kubernetes API; relying on the heartbeats of block servers")
            return
        try:
            api = await in_daemon_thread(
                lambda: KubernetesApi(
                    kubeconfig, settings.pod_selector, self.metrics, self.intervals.kubernetes_answer_s
                )
            )
        except ApiUnavailable as failure:
            self._failures.about("watch", failure)
            return
        loop = asyncio.get_running_loop()
        watch = PodWatch(
            api,
            self.intervals.list_pods_s,
            tell=lambda update: post(loop, lambda: self._learn(update)),
            complain=lambda failure: post(loop, lambda: self._failures.about("watch", failure)),
            fail=lambda failure: post(loop, lambda: self._watch_failed(failure)),
            after_forbidden_s=self.intervals.after_forbidden_s,
        )
        own_pod = PodRef(settings.pod_name, settings.pod_uid)
        self._recorder = PodRecorder(
            api, self.registry, own_pod, self._failures,
            after_failures_s=self.intervals.after_failures_s, lead_ms=2 * self._mark_ms,
        )  # fmt: skip
        tasks = self.tasks.subgroup()
        watch.start()
        try:
            tasks.start_restartable(partial(self._write, self._recorder), "pod_tags")
            while True:
                with contextlib.suppress(CorollaError):
                    await self._round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.intervals.relist_s):
                        await self._has_news.wait()
                self._has_news.clear()
                if self._failure is not None:
                    bug, self._failure = self._failure, None
                    raise bug
                await asyncio.sleep(_SHORTEST_ROUND_S)
        finally:
            watch.stop()
            await tasks.close()

    def deregistered(self, pod_uid: str, farewell: pb.DeregisterServerRequest) -> None:
        """Notes that a block server in this pod has left, and what happened to its sessions."""
        if self._recorder is not None and pod_uid in self._pods:
            pod = self._pods[pod_uid]
            self._recorder.deregistered(
                PodRef(pod.name, pod.uid), farewell.num_moved_sessions, farewell.num_left_sessions
            )

    def _learn(self, update: Update) -> None:
        update(self._pods)
        self.metrics.pod_watch_up.set(self._pods.is_current)
        self._has_news.set()

    def _watch_failed(self, failure: Exception) -> None:
        self._failure = failure
        self._has_news.set()

    async def _round(self) -> None:
        """Marks the servers that their pods keep from new sessions, and removes those whose pods have gone.

        Only the leading router removes servers, so that watchers learn of a loss at once, and not of a server that
        leaves in order. Marks end unless a round repeats them. A removed server that lives on registers again with its
        next heartbeat, and is marked from then on.
        """
        # The pods are read before the rosters: a model counts as local only by a roster that is newer than its pods.
        uids = {pod.uid for pod in self._pods}
        rosters = [roster async for roster in self.registry.rosters()]
        self._rosters = rosters
        self._local_models = {
            each.model for each in rosters if any(server.server.pod_uid in uids for server in each.servers)
        }
        for roster in rosters:
            before = self._withheld.get(roster.model, {})
            now = withheld_servers(roster.servers, self._pods, self._removed)
            self._withheld[roster.model] = now
            # Otherwise each router would remove a server that lives on and has registered again.
            if self._recorder is not None and self._recorder.leads:
                await self._remove_gone(roster)
            for server_id, reason in now.items():
                if before.get(server_id) is not reason:
                    log.info(
                        "the pod of a block server is leaving or not ready", extra={"server": server_id, "pod": reason}
                    )
                await self.registry.withhold(roster.model, server_id, reason, self._mark_ms)
            for server_id in before.keys() - now.keys():
                await self.registry.withhold(roster.model, server_id, "", self._mark_ms)

    async def _remove_gone(self, roster: Roster) -> None:
        for each in roster.servers:
            server_id = each.server.server_id
            if self._pods.has_gone(each.server.pod_uid) and server_id not in self._removed:
                if len(self._removed) >= _MOST_REMOVED:
                    self._removed.clear()
                self._removed.add(server_id)
                log.info("the pod of a block server has gone", extra={"server": server_id})
                await self.registry.deregister(roster.model, server_id)

    async def _write(self, recorder: PodRecorder) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(CorollaError):
                await recorder.look(self._rosters, self._local_models, self._pods, clock)
            await asyncio.sleep(self.intervals.relist_s)
