"""The router as a table of its parts, in the order in which they start, and what orders block servers to move."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from corolla.chassis.audit import Caller
from corolla.chassis.errors import CorollaError, StoreUnavailable
from corolla.chassis.handlers import Call
from corolla.chassis.lifecycle import fail, run_service
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.parts import Part, Parts
from corolla.chassis.tasks import TaskGroup
from corolla.router.cluster.connection import ClusterConnection
from corolla.router.intervals import USUAL_INTERVALS, RouterIntervals
from corolla.router.metrics import RouterMetrics
from corolla.router.quotas import Quotas
from corolla.router.rebalancing import Interruptions, Member, Move, next_move
from corolla.router.registry import Registry
from corolla.router.roster import Roster
from corolla.router.servicer import RouterServicer
from corolla.router.sessions import SessionBounds, SessionRecords
from corolla.router.settings import RouterSettings
from corolla.router.store import Store
from corolla.router.validation import check
from corolla.router.watch import PlacementWatches
from corolla.trust.addresses import CallerAddress
from corolla.trust.credentials import workload_of_call
from corolla.v1 import router_pb2
from corolla.wire.network import Network

log = logging.getLogger(__name__)

_SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"]


_Advice = tuple[Sequence[Member], bool, Move | None]


@dataclass(eq=False, repr=False)
class Rebalancer:
    """Orders moves. Each router decides by itself; the store accepts an order only when no move is under way.

    Args:
        min_gain: The fraction by which a move must make the slowest block faster.
    """

    registry: Registry
    metrics: RouterMetrics
    min_gain: float
    intervals: RouterIntervals
    # The members at the last look, whether they might interrupt answers, and the best move; by model and fingerprint.
    _advice: dict[tuple[str, str], _Advice] = field(init=False, default_factory=dict)
    _interruptions: Interruptions = field(init=False)

    def __post_init__(self) -> None:
        self._interruptions = Interruptions(self.intervals.return_s)

    async def run(self) -> None:
        """Looks at the placements of all models again and again, for ever."""
        while True:
            try:
                async for roster in self.registry.rosters():
                    await self._look(roster)
            except CorollaError:
                self._advice.clear()
                self._interruptions.saw_nothing(asyncio.get_running_loop().time())
            await asyncio.sleep(self.intervals.settle_s)

    async def run_takeovers(self) -> None:
        """Has servers that keep lost spans take these over, as soon as the store knows of the loss, for ever."""
        time_s, next_s = asyncio.get_running_loop().time, 0.0
        with_spares: set[str] = set()
        while True:
            models = with_spares.copy()
            with suppress(CorollaError):
                if time_s() >= next_s:
                    next_s = time_s() + self.intervals.relist_s
                    models.update(await self.registry.models())
                async for roster in self.registry.rosters(models):
                    (with_spares.add if roster.has_spares else with_spares.discard)(roster.model)
                    await self._take_over(roster)
            await asyncio.sleep(self.intervals.takeover_s if with_spares else self.intervals.relist_s)

    async def _take_over(self, roster: Roster) -> None:
        found = roster.takeover() if roster.has_spares else None
        if found is not None and await self.registry.order(roster, found):
            self.metrics.move_ordered(roster.model, covers=True)
            log.info("a spare takes over", extra={"model": roster.model, "blocks": str(found.span)})

    async def _look(self, roster: Roster) -> None:
        """Orders a model's best move if it was also the best one at the last look."""
        now_s, groups = asyncio.get_running_loop().time(), roster.members()
        self._interruptions.look(roster.model, groups, roster.num_blocks, now_s)
        if not roster.is_settled:
            groups = {}
        for key in [key for key in self._advice if key[0] == roster.model and key[1] not in groups]:
            del self._advice[key]
        for fingerprint, members in groups.items():
            key = (roster.model, fingerprint)
            may_interrupt = self._interruptions.may_begin(*key, now_s)
            *before, advised = self._advice.get(key, ((), False, None))
            if [members, may_interrupt] == before:
                move = advised
            else:
                move = await asyncio.to_thread(
                    next_move, members, roster.num_blocks, min_gain=self.min_gain, may_interrupt=may_interrupt
                )
            self._advice[key] = (members, may_interrupt, move)
            pause_ms = round(self.intervals.between_moves_s * 1000)
            if move is not None and move == advised and await self.registry.order(roster, move, pause_ms):
                self.metrics.move_ordered(roster.model, covers=move.covers)
                log.info("a block server moves", extra={"model": roster.model, "to": str(move.span)})
                return


class RouterProcess:
    """One router in this process.

    Raises:
        StartupError: A port is taken, or the Redis address is not valid.
    """

    def __init__(self, settings: RouterSettings, *, intervals: RouterIntervals = USUAL_INTERVALS) -> None:
        self.settings = settings
        self._intervals = intervals
        metrics_registry = new_registry()
        self._metrics = RouterMetrics(metrics_registry)
        self._store = Store(
            settings.redis_url.get_secret_value(),
            settings.redis_timeout_ms / 1000,
            self._metrics,
            password=settings.redis_password.get_secret_value(),
        )
        self._registry = Registry(self._store, settings.lease_ms, settings.expected_models, intervals.read_whole_s)
        self._sessions = SessionRecords(
            self._store,
            SessionBounds(
                settings.max_tenant_sessions, settings.max_tenant_session_mib << 20, settings.max_session_mib << 20
            ),
        )
        self._tasks = TaskGroup(lambda: fail(self._rpc.not_ready), TaskMetrics(metrics_registry))
        self._watches = PlacementWatches(
            self._registry,
            self._tasks.subgroup(),
            relist_interval_s=intervals.relist_s,
            load_push_interval_s=settings.load_push_interval_s,
        )
        self._network = Network.from_folder(settings.tls_dir)
        rpc_metrics = RpcMetrics(metrics_registry)
        self._rpc = self._network.rpc_server(
            settings.host, settings.port, rpc_metrics, with_reflection=settings.reflection
        )
        self._cluster = ClusterConnection(self._registry, self._metrics, settings, intervals, self._tasks.subgroup())
        servicer = RouterServicer(
            settings,
            self._registry,
            self._sessions,
            Quotas(self._store),
            self._watches,
            registrant=self._registrant,
            on_deregistered=self._cluster.deregistered,
        )
        self._rpc.add(
            _SERVICE,
            self._network.service_handler(
                _SERVICE, servicer, rpc_metrics, max_request_bytes=settings.max_request_bytes, check=check
            ),
        )
        self._metrics_endpoint = MetricsEndpoint(
            metrics_registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        self._parts = Parts(
            Part("metrics port", stop=lambda: asyncio.to_thread(self._metrics_endpoint.close)),
            Part("store", stop=self._store.close),
            Part("grpc port", stop=lambda: self._rpc.stop(settings.grace_s)),
            Part("watches", stop=self._watches.close),
            Part("tasks", stop=self._tasks.close),
            Part("metrics", self._metrics_endpoint.start, ["metrics port"]),
            Part("certificates", lambda: self._network.start_renewal(self._tasks), ["tasks"]),
            Part("calls", self._rpc.start, ["grpc port"]),
            Part("redis", self._wait_for_redis, ["store"]),
            Part("placement", self._keep_placement, ["redis", "tasks"]),
            Part("readiness", self._rpc.ready, ["calls", "placement"], self._rpc.not_ready),
        )

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        return self._metrics_endpoint.port

    async def start(self) -> None:
        """Starts the router. Returns when Redis answers and the router serves; until then health is NOT_SERVING.

        Later, the router stays SERVING while Redis does not answer, because a restart of the router would not help.
        """
        await self._parts.start()
        log.info("router serves", extra={"port": self.port, "metrics_port": self.metrics_port})

    async def stop(self) -> None:
        """Sets health to NOT_SERVING, ends the watches, lets running calls finish and closes everything."""
        await self._parts.stop()

    def _keep_placement(self) -> None:
        self._tasks.start_essential(self._observe_placement, "placement_statistics")
        if self.settings.rebalance:
            rebalancer = Rebalancer(self._registry, self._metrics, self.settings.rebalance_min_gain, self._intervals)
            self._tasks.start_essential(rebalancer.run, "rebalancing")
            self._tasks.start_restartable(rebalancer.run_takeovers, "takeovers")
        self._tasks.start_restartable(self._cluster.run, "kubernetes")

    def _registrant(self, call: Call[Caller], server: router_pb2.ServerDescription | None) -> str:
        if self._network.credentials is None:
            return ""
        caller = CallerAddress.from_call(call.context.auth_context(), call.context.peer())
        if server is not None:
            caller.check(server.address)
        return str(workload_of_call(call.context.auth_context()))

    async def _observe_placement(self) -> None:
        """Shows the store's state in the gauges, for ever. Its snapshots also remove servers with expired leases."""
        shown: set[str] = set()
        while True:
            await self._store.follow_primary()
            with suppress(CorollaError):
                async for roster in self._registry.rosters():
                    num_sessions = await self._sessions.count(roster.model)
                    if roster.is_known or num_sessions:
                        self._metrics.observe(roster, num_sessions)
                        shown.add(roster.model)
                        continue
                    await self._registry.forget(roster.model)
                    if roster.model in shown:
                        self._metrics.forget(roster.model)
                        shown.discard(roster.model)
            await asyncio.sleep(self._intervals.relist_s)

    async def _wait_for_redis(self) -> None:
        has_logged = False
        while True:
            try:
                await self._store.check()
            except StoreUnavailable as error:
                self._metrics.store_up.set(0)
                if not has_logged:
                    log.warning(
                        "waiting for Redis; the router serves nothing until it answers", extra={"cause": error.message}
                    )
                has_logged = True
                await asyncio.sleep(self._intervals.relist_s)
            else:
                self._metrics.store_up.set(1)
                return


def run(**overrides: Any) -> int:
    """Runs a router until a signal; `overrides` win over the environment. Returns the exit status."""
    return run_service(RouterSettings, RouterProcess, **overrides)
