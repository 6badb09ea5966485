"""Makes what a scenario says go wrong, and right again."""

from collections.abc import Callable, Sequence

from tests.simulation.callers import Caller
from tests.simulation.cluster import Cluster, Server
from tests.simulation.scenario import GRACE_S, Fault

_ROLLBACK_S = 0.5


class Faults:
    """Breaks a cluster."""

    def __init__(self, cluster: Cluster, callers: Sequence[Caller]) -> None:
        self._cluster = cluster
        self._callers = callers

    def schedule(self, fault: Fault) -> None:
        """From the start of the run on."""
        self._cluster.loop.at(self._cluster.loop.time() + fault.at_s, lambda: self._begin(fault))

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        self._cluster.loop.at(self._cluster.loop.time() + seconds, work)

    def _begin(self, fault: Fault) -> None:
        cluster, network, redis = self._cluster, self._cluster.network, self._cluster.redis
        match fault.kind:
            case "kill":
                network.kill(cluster.servers[fault.target].process)
                self._later(fault.seconds, lambda: cluster.restart_server(fault.target))
            case "drain":
                server = cluster.servers[fault.target]
                if not server.process.is_dead:
                    server.process.keep_up(self._leave(server))
                    self._later(fault.seconds, lambda: self._come_back(server))
            case "freeze":
                process = cluster.servers[fault.target].process
                network.freeze(process)
                self._later(fault.seconds, process.resume)
            case "cut":
                self._cut(fault, f"client{fault.other}")
            case "cut peer":
                self._cut(fault, f"server{fault.other}")
            case "reset":
                network.reset(f"server{fault.target}", self._other(fault))
            case "bad numbers":
                cluster.servers[fault.target].runner.num_bad_batches = 1
            case "slow" | "repeat":
                self._disturb(fault)
            case "router kill":
                network.kill(cluster.routers[0].process)
                self._later(fault.seconds, lambda: cluster.restart_router(0))
            case "redis gone":
                redis.is_gone = True
                self._later(fault.seconds, lambda: setattr(redis, "is_gone", False))
            case "redis frozen":
                redis.freeze()
                self._later(fault.seconds, redis.thaw)
            case "redis flush":
                redis.flush()
            case "redis rollback":
                self._later(_ROLLBACK_S, redis.backup())
            case "redis full":
                redis.is_full = True
                self._later(fault.seconds, lambda: setattr(redis, "is_full", False))
            case "client kill":
                network.kill(cluster.clients[fault.target].process)
                self._later(fault.seconds, lambda: cluster.restart_client(fault.target))
            case "client freeze":
                process = cluster.clients[fault.target].process
                network.freeze(process)
                self._later(fault.seconds, process.resume)
            case "cancel":
                self._callers[fault.target].leave()
            case _:
                raise ValueError(fault.kind)

    async def _leave(self, server: Server) -> None:
        await server.leave(GRACE_S)
        self._later(0.0, lambda: self._cluster.network.kill(server.process))

    def _come_back(self, server: Server) -> None:
        """Its pod's time is over, whether it got that far or not."""
        if self._cluster.servers[server.number] is server:
            self._cluster.network.kill(server.process)
            self._cluster.restart_server(server.number)

    def _other(self, fault: Fault) -> str:
        num_servers = len(self._cluster.servers)
        return f"server{fault.other}" if fault.other < num_servers else f"client{fault.other - num_servers}"

    def _cut(self, fault: Fault, other: str) -> None:
        server = f"server{fault.target}"
        if fault.directions & 1:
            self._cluster.network.cut(other, server, fault.seconds)
        if fault.directions & 2:
            self._cluster.network.cut(server, other, fault.seconds)

    def _disturb(self, fault: Fault) -> None:
        server, until_s = f"server{fault.target}", self._cluster.loop.time() + fault.seconds
        others = [each.process.name for each in (*self._cluster.servers, *self._cluster.clients)]
        for other in others:
            for link in (self._cluster.network.link(server, other), self._cluster.network.link(other, server)):
                if fault.kind == "slow":
                    link.slow_until_s = until_s
                else:
                    link.repeats_until_s = until_s
