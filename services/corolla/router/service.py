"""Composition root of the router."""

import asyncio
import logging
from typing import Any

from corolla.chassis.errors import StoreUnavailable
from corolla.chassis.handlers import service_handler
from corolla.chassis.lifecycle import TaskGroup, run_service
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, new_registry
from corolla.chassis.rpc_server import RpcServer
from corolla.router.census import run_census
from corolla.router.cluster.keeper import ClusterKeeper
from corolla.router.metrics import RouterMetrics
from corolla.router.rebalancer import Rebalancer
from corolla.router.registry import Registry
from corolla.router.servicer import RouterServicer
from corolla.router.sessions import SessionRecords
from corolla.router.settings import RouterSettings
from corolla.router.store import Store
from corolla.router.watch import PlacementWatches
from corolla.v1 import router_pb2

log = logging.getLogger(__name__)

_SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"]


class RouterProcess:
    """One router in this process. Raises StartupError when ports are taken or the Redis address is none."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        metrics_registry = new_registry()
        self._metrics = RouterMetrics(metrics_registry)
        self._store = Store(
            settings.redis_url.get_secret_value(),
            settings.redis_timeout_ms / 1000,
            self._metrics,
            password=settings.redis_password.get_secret_value(),
        )
        self._registry = Registry(self._store, settings.lease_ms)
        self._sessions = SessionRecords(self._store)
        self._watches = PlacementWatches(
            self._registry,
            relist_interval_s=settings.relist_interval_s,
            load_push_interval_s=settings.load_push_interval_s,
        )
        self._tasks = TaskGroup()
        self._rpc = RpcServer(settings.host, settings.port, with_reflection=settings.reflection)
        self._cluster = ClusterKeeper(self._registry, self._metrics, settings)
        servicer = RouterServicer(
            settings, self._registry, self._sessions, self._watches, on_departure=self._cluster.departed
        )
        self._rpc.add(
            _SERVICE,
            service_handler(
                _SERVICE, servicer, RpcMetrics(metrics_registry), max_request_bytes=settings.max_request_bytes
            ),
        )
        self._metrics_endpoint = MetricsEndpoint(metrics_registry, settings.metrics_host, settings.metrics_port)

    @property
    def port(self) -> int:
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        return self._metrics_endpoint.port

    async def start(self) -> None:
        """Returns when Redis answers and the router serves; until then health is NOT_SERVING.

        Later, the router stays SERVING while Redis is away: to restart it would heal nothing.
        """
        await self._rpc.start()
        await self._wait_for_redis()
        self._tasks.start(
            run_census(self._registry, self._sessions, self._metrics, self.settings.relist_interval_s), "census"
        )
        if self.settings.rebalance:
            self._tasks.start(Rebalancer(self._registry, self._metrics, self.settings).run(), "rebalancing")
        self._tasks.start(self._cluster.run(), "kubernetes")
        await self._rpc.ready()
        log.info("router serves", extra={"port": self.port, "metrics_port": self.metrics_port})

    async def _wait_for_redis(self) -> None:
        is_told = False
        while True:
            try:
                await self._store.check()
            except StoreUnavailable:
                self._metrics.store_up(False)
                if not is_told:
                    log.warning("waiting for redis; nothing is served until it answers")
                is_told = True
                await asyncio.sleep(self.settings.relist_interval_s)
            else:
                self._metrics.store_up(True)
                return

    async def stop(self) -> None:
        """Says NOT_SERVING, ends the watches, lets running calls finish and closes everything."""
        await self._rpc.not_ready()
        await self._tasks.close()
        await self._watches.close()
        await self._rpc.stop(self.settings.grace_s)
        await self._store.close()
        await asyncio.to_thread(self._metrics_endpoint.close)


def run(**overrides: Any) -> int:
    """Runs a router until a signal; `overrides` win over the environment. Returns the exit status."""
    return run_service(RouterSettings, RouterProcess, **overrides)
