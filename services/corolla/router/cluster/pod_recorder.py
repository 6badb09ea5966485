"""Writes tags of pods and Events to Kubernetes; one router does so for all routers."""

import collections
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

from corolla.chassis.breaker import Breaker
from corolla.router.cluster.api import ApiUnavailable, FailureLog, KubernetesApi, in_daemon_thread
from corolla.router.cluster.events import ClusterEvent, CoverageReporter, DrainReporter, PodRef
from corolla.router.cluster.labels import Patch, TagPlan, wanted_tags
from corolla.router.cluster.pods import PodTable
from corolla.router.registry import Registry
from corolla.router.roster import Roster

_MOST_FAILURES: Final = 3
_MOST_WAITING_EVENTS: Final = 100


class PodRecorder:
    """Writes tags and Events to Kubernetes. All routers see the same states, and only the leading router writes them.

    A server that leaves reports the fate of its sessions to one router only, and that router writes the Event.

    Args:
        registry: The placement in the store, by which routers elect the leading one.
        own_pod: The pod of this router; without its name, no Events about spans are written.
        after_failures_s: The pause after several failed writes.
        lead_ms: The time after which another router leads if this one is silent.
    """

    def __init__(
        self,
        api: KubernetesApi,
        registry: Registry,
        own_pod: PodRef,
        failures: FailureLog,
        *,
        after_failures_s: float,
        lead_ms: int,
    ) -> None:
        self._api = api
        self._registry = registry
        self._own_pod = own_pod
        self._failures = failures
        self._lead_ms = lead_ms
        self._router_id = secrets.token_hex(8)
        self._tags = TagPlan()
        self._spans = CoverageReporter()
        self._handovers = DrainReporter()
        self._models: set[str] = set()
        self._waiting: collections.deque[ClusterEvent] = collections.deque(maxlen=_MOST_WAITING_EVENTS)
        self._breakers = {call: Breaker(_MOST_FAILURES, after_failures_s) for call in ("patch", "event")}

    def deregistered(self, pod: PodRef, num_moved: int, num_left: int) -> None:
        """Notes that a block server has left, and what happened to its sessions."""
        self._handovers.note(pod, num_moved, num_left)

    async def look(
        self, rosters: Sequence[Roster], local_models: Collection[str], pods: PodTable, clock: Callable[[], float]
    ) -> None:
        """Writes what is due. Raises StoreUnavailable when the store cannot name the leading router.

        Args:
            local_models: The models that have a server in one of the pods.
            clock: The time in seconds.
        """
        # This call comes first, since it may fail: the reporters below count as written what they return.
        leads = await self._registry.lead(
            f"pods:{self._api.namespace}:{self._api.selector}", self._router_id, self._lead_ms
        )
        now_s = clock()
        # Releases in other namespaces may share the store; their own routers report on their models.
        self._models |= set(local_models)
        self._models &= {each.model for each in rosters}
        self._spans.forget(self._models)
        own = [each for each in rosters if each.model in self._models and each.is_known]
        seen = [self._spans.look(each.model, each.uncovered(), now_s) for each in own]
        self._waiting.extend(self._handovers.due(now_s))
        if leads and self._own_pod.name:
            self._waiting.extend(each for each in seen if each is not None)
        if leads and pods.is_current:
            wanted = {uid: tags for each in rosters for uid, tags in wanted_tags(each.servers).items()}
            await self._patch(self._tags.due(pods, wanted, now_s), clock)
        await self._record(clock)

    async def _patch(self, patches: Iterable[Patch], clock: Callable[[], float]) -> None:
        for patch in patches:
            # After a failure the next pod is tried, since the reason may apply to one pod only.
            await self._try("patch", partial(self._api.patch, patch), clock)

    async def _record(self, clock: Callable[[], float]) -> None:
        while self._waiting:
            if not await self._try("event", partial(self._api.record, self._waiting[0], self._own_pod), clock):
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
            self._failures.about(call, failure)
            return False
        breaker.succeeded()
        self._failures.about(call, None)
        return True
