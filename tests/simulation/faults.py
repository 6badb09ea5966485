"""Applies the faults of a scenario, and ends them."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from corolla.block_server.hop_session import HopSession, SessionEvent
from tests.simulation.callers import Caller
from tests.simulation.cluster import Client, Cluster, Server
from tests.simulation.loop import current_process
from tests.simulation.scenario import CLIENT, GRACE_S, HEIR, LEAVER, Fault, Mishap

_ROLLBACK_S: Final = 0.5


class Faults:
    """Breaks a cluster.

    Args:
        damage: has the next part of a handover arrive changed at a server.
        note: is told of what a mishap has become, now that it is known whom it hits.
    """

    def __init__(
        self,
        cluster: Cluster,
        callers: Sequence[Caller],
        damage: Callable[[Server], None],
        note: Callable[[Fault], None],
    ) -> None:
        self._cluster = cluster
        self._callers = callers
        self._damage = damage
        self._note = note
        self._handovers: list[_Handovers] = []

    def schedule(self, fault: Fault) -> None:
        """Plans a fault, by its time since the start of the run."""
        self._cluster.loop.at(self._cluster.loop.time() + fault.at_s, lambda: self._begin(fault))

    def happened(self, session: HopSession[Any], event: SessionEvent) -> None:
        """Takes note of what happened to a session on a hop: it may be the moment of a mishap."""
        process, session_id = current_process(), session.request.session_id
        server = next((each for each in self._cluster.servers if each.process is process), None)
        if server is None:
            return
        for handovers in self._handovers:
            for mishap in handovers.happened(server, session_id, event):
                fault = self._as_fault(mishap, handovers, session)
                if fault is not None:
                    # Not in the midst of what the event is a part of.
                    self._later(mishap.delay_s, partial(self._begin_mishap, fault))

    def _begin_mishap(self, fault: Fault) -> None:
        self._cluster.faults.append(fault)
        self._note(fault)
        self._begin(fault)

    def _as_fault(self, mishap: Mishap, handovers: "_Handovers", session: HopSession[Any]) -> Fault | None:
        """None where no process is left that it could hit."""
        heir, client = handovers.heirs[session.request.session_id], self._client_of(session)
        if client is None and CLIENT in (mishap.who, mishap.other):
            return None
        client_number = 0 if client is None else client.number
        numbers = {LEAVER: handovers.leaver.number, HEIR: heir.number, CLIENT: client_number}
        kind, other = mishap.fault_kind, numbers.get(mishap.other, 0)
        if kind == "cut" and mishap.other == HEIR:
            kind = "cut peer"
        elif kind == "reset" and mishap.other == CLIENT:
            other += len(self._cluster.servers)
        elif kind == "cancel":
            found = [caller.number for caller in self._callers if caller.holds(session.request.session_id)]
            if not found:
                return None
            numbers[CLIENT] = found[0]
        now_s = self._cluster.loop.time()
        return Fault(kind, now_s + mishap.delay_s, numbers[mishap.who], other, mishap.seconds, mishap.directions)

    def _client_of(self, session: HopSession[Any]) -> Client | None:
        clients = self._cluster.clients
        return next((each for each in clients if each.plane.client_id == session.request.client_id), None)

    def _later(self, seconds: float, work: Callable[[], object]) -> None:
        self._cluster.loop.at(self._cluster.loop.time() + seconds, work)

    def _begin(self, fault: Fault) -> None:
        cluster, network, redis = self._cluster, self._cluster.network, self._cluster.redis
        cluster.begun.append(fault)
        match fault.kind:
            case "kill":
                network.kill(cluster.servers[fault.target].process)
                self._later(fault.seconds, lambda: cluster.restart_server(fault.target))
            case "drain":
                server = cluster.servers[fault.target]
                if not server.process.is_dead:
                    self._handovers.append(_Handovers(server, fault.mishaps))
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
            case "damage":
                self._damage(cluster.servers[fault.target])
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


class _Handovers:
    """What the mishaps of one drain wait for.

    Attributes:
        heirs: by session, who takes it over.
    """

    def __init__(self, leaver: Server, mishaps: Sequence[Mishap]) -> None:
        self.leaver = leaver
        self.heirs: dict[bytes, Server] = {}
        self._waiting = list(mishaps)
        self._num_events: Counter[SessionEvent] = Counter()

    def happened(self, server: Server, session_id: bytes, event: SessionEvent) -> list[Mishap]:
        """Those whose moment it is."""
        if event is SessionEvent.OFFERED and self.leaver.sessions.get(session_id) is not None:
            self.heirs[session_id] = server
        heir = self.heirs.get(session_id)
        if heir is None or server is not (self.leaver if event is SessionEvent.LAST_PART_READ else heir):
            return []
        moment = SessionEvent.ARRIVED if event is SessionEvent.ARRIVED_PARKED else event
        due = [each for each in self._waiting if each.moment is moment and each.num_skipped <= self._num_events[moment]]
        self._num_events[moment] += 1
        self._waiting = [each for each in self._waiting if each not in due]
        return due
