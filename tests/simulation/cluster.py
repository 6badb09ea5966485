"""The services of a scenario: the real ones, put together on a network, a Redis and a clock that are simulated."""

import asyncio
import secrets
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry

from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.drain import Drain
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import Identity
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.handover.sender import HandoverLinks, HandoverSender
from corolla.block_server.handover.standbys import Standbys
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.peers import PeerTable
from corolla.block_server.periodic_tasks import PeriodicTasks
from corolla.block_server.registration import Registration
from corolla.block_server.relay import Relay
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import StepWork
from corolla.cache.store import SessionCache
from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.reservations import ChainLimits
from corolla.chain.routes import Routes
from corolla.chain.streams import DataPlane
from corolla.chassis.handlers import service_handler
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.settings import load
from corolla.chassis.tasks import TaskGroup
from corolla.client.adapters import ModelNames
from corolla.client.generation.admission import Admission
from corolla.client.generation.answer_factory import AnswerFactory, ModelLimits
from corolla.client.generation.running_request import Entrance
from corolla.client.generation.waiting_line import WaitingLine
from corolla.client.metrics import ClientMetrics
from corolla.client.quotas.enforcer import QuotaEnforcer
from corolla.client.reply_sizes import TokenWidths
from corolla.client.text.grammar_process import GrammarProcess
from corolla.client.transcripts import Transcripts
from corolla.router.intervals import USUAL_INTERVALS
from corolla.router.metrics import RouterMetrics
from corolla.router.quotas import Quotas
from corolla.router.registry import Registry
from corolla.router.servicer import RouterServicer
from corolla.router.sessions import SessionRecords
from corolla.router.settings import RouterSettings
from corolla.router.watch import PlacementWatches
from corolla.v1 import blocks_pb2, router_pb2
from corolla.wire.span import Span
from tests.simulation.callers import WatchedAnswering, WatchedSessions
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network
from tests.simulation.scenario import GROWTH_TOKENS, MOST_NEW_TOKENS, Fault, Scenario
from tests.simulation.store import SimulatedRedis, SimulatedStore
from tests.simulation.toy_model import ToyEdges, ToyRunner, ToyTokenizer, unexpected_failure

FINGERPRINT: Final = "toy"
MODEL: Final = "toy"
ROUTER: Final = "router:1"
LEASE_S: Final = 6.0
"""The lease of sessions on hops; that of conversations as well."""

_ROUTER: Final = router_pb2.DESCRIPTOR.services_by_name["RouterService"]


class Server:
    """One incarnation of a block server."""

    def __init__(self, cluster: "Cluster", number: int, span: Span) -> None:
        self.process = Process(cluster.loop, f"server{number}", lambda: cluster.scenario.compute_s[number])
        self.number = number
        self.span = span
        self.address = f"server{number}:1"
        self.server_id = secrets.token_hex(16)
        scenario, channels = cluster.scenario, cluster.network.channels(self.process)
        streams, clock = cluster.network.streams(self.process), cluster.loop.time
        self.runner = ToyRunner(
            scenario.model, span, num_pages=scenario.num_pages, page_tokens=scenario.page_tokens,
            max_step_tokens=scenario.max_step_tokens,
        )  # fmt: skip
        self.runner.warm_up()
        metrics = BlockServerMetrics(CollectorRegistry())
        self.scheduler: Scheduler[StepWork] = Scheduler(scenario.max_batch_tokens, 1024)
        self.outputs = BoundaryActivations(scenario.boundary_activation_bytes)
        self.sessions: SessionTable[SessionCache] = SessionTable(
            self.runner.store.pool, self.runner.new_cache, on_forget=self.outputs.forget
        )
        self.peers = PeerTable()
        description = self._description(scenario)
        self._registration = Registration(ROUTER, description, self._load, channels)
        self._tasks = TaskGroup()
        self._neighbours = Neighbours(self._registration.placement, self._tasks, clock)
        relay = partial(Relay, FINGERPRINT, self.peers, connect=streams, clock=clock, neighbours=self._neighbours)
        self.engine = self.process.call(
            lambda: Engine(
                self.runner,
                self.scheduler,
                self.sessions,
                self.outputs,
                self.peers,
                relay,
                metrics,
                clock,
                fail=unexpected_failure,
                edges=ToyEdges(scenario.model) if span.start == 0 or span.end == scenario.model.num_blocks else None,
                # A server that is a whole chain launches steps ahead, as on a device; of the others, each second one
                # launches from its event loop.
                launches_head_early=len(span) == scenario.model.num_blocks,
                launches_inline=number % 2 == 0,
            )
        )
        self._metrics = metrics
        identity = Identity(
            server_id=self.server_id, span=span, model=MODEL, fingerprint=FINGERPRINT, dtype_name="float32",
            dtype=blocks_pb2.TENSOR_TYPE_FLOAT32, hidden_size=1, max_tokens_per_frame=scenario.max_step_tokens,
            prefix_page_tokens=scenario.page_tokens if scenario.has_prefix_cache else 0,
            num_model_blocks=scenario.model.num_blocks, vocab_size=scenario.model.vocab_size,
            context_length=4096,
        )  # fmt: skip
        most = scenario.max_step_tokens
        receiver = HandoverReceiver(span, self.sessions, self.engine, metrics, self._tasks, max_part_tokens=most)
        sender = HandoverSender(span, self.sessions, self.engine, max_part_tokens=most)
        standbys = self.standbys = Standbys(
            self.sessions, sender, HandoverLinks(streams, FINGERPRINT), self.peers, self._neighbours, self._tasks,
            metrics, least_tokens=scenario.page_tokens,
        )  # fmt: skip
        servicer = BlockServicer(
            identity, self.engine, self.sessions, self.outputs, self.peers, self.runner.store, receiver,
            self._tasks, num_heartbeats=lambda: self._registration.num_heartbeats,
            standbys=standbys if scenario.has_prefix_cache else None,
        )  # fmt: skip
        self._drain = Drain(
            description, self.sessions, self.engine, self.peers, self._registration, sender,
            HandoverLinks(streams, FINGERPRINT), metrics, standbys,
        )  # fmt: skip
        self._heartbeats: asyncio.Task[None] | None = None
        cluster.network.take_streams(self.address, self.process, servicer.accept)
        self.process.keep_up(self._run())

    async def _run(self) -> None:
        await self._registration.register(self.span)
        self._registration.state = router_pb2.SERVER_STATE_READY
        periodic_tasks = PeriodicTasks(
            self.engine, self.scheduler, self.sessions, self.outputs, self.peers, self._metrics,
            standby_lags=lambda: self.standbys.lags,
        )  # fmt: skip
        self._heartbeats = asyncio.create_task(self._registration.run())
        await asyncio.gather(self.engine.run(), periodic_tasks.run(), self._neighbours.run())

    async def leave(self, grace_s: float) -> None:
        """What its first signal asks for: everything but the end."""
        await self._drain.drain(grace_s)
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        await self._registration.deregister()

    def _description(self, scenario: Scenario) -> router_pb2.ServerDescription:
        return router_pb2.ServerDescription(
            server_id=self.server_id, address=self.address, model=MODEL, fingerprint=FINGERPRINT, dtype="float32",
            num_model_blocks=scenario.model.num_blocks, capacity_blocks=len(self.span), decode_tokens_per_second=20.0,
            prefill_tokens_per_second=100.0,
        )  # fmt: skip

    def _load(self) -> router_pb2.ServerLoad:
        pool = self.sessions.pool
        return router_pb2.ServerLoad(
            num_sessions=len(self.sessions), num_pages=pool.num_pages,
            num_free_pages=self.sessions.num_available_pages,
            max_session_tokens=self.sessions.max_session_tokens,
            num_queued_steps=len(self.scheduler), decode_step_seconds=self.engine.decode_step_seconds,
        )  # fmt: skip


class Router:
    """One incarnation of a router."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.process = Process(cluster.loop, f"router{number}")
        self.process.call(lambda: self._build(cluster))

    def _build(self, cluster: "Cluster") -> None:
        metrics = RouterMetrics(CollectorRegistry())
        settings = load(RouterSettings)
        store = SimulatedStore(cluster.redis, settings.redis_timeout_ms / 1000, metrics)
        registry, sessions = Registry(store, settings.lease_ms), SessionRecords(store)
        watches = PlacementWatches(
            registry,
            TaskGroup(),
            relist_interval_s=USUAL_INTERVALS.relist_s,
            load_push_interval_s=settings.load_push_interval_s,
        )
        servicer = RouterServicer(
            settings, registry, sessions, Quotas(store), watches, registrant=lambda _context, _server: "",
            on_deregistered=lambda _pod, _request: None,
        )  # fmt: skip
        handler = service_handler(_ROUTER, servicer, cluster.rpc_metrics)
        cluster.network.listen(ROUTER, self.process, [handler])


class Client:
    """One incarnation of a client service."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.process = Process(cluster.loop, f"client{number}")
        self.number = number
        self.process.call(lambda: self._build(cluster))

    def _build(self, cluster: "Cluster") -> None:
        scenario, channels = cluster.scenario, cluster.network.channels(self.process)
        metrics = ClientMetrics(CollectorRegistry())
        control = ControlPlane(ROUTER, MODEL, channels, record_timeout_s=5.0)
        placement = PlacementWatch(control)
        self.process.keep_up(placement.run())
        self.plane = DataPlane(FINGERPRINT, TaskGroup(), connect=cluster.network.streams(self.process))
        routes = Routes(control, placement, FINGERPRINT, scenario.model.num_blocks)
        limits = ChainLimits(
            prefill_chunk_tokens=scenario.prefill_chunk_tokens,
            fewer_during_decode=2,
            step_timeout_s=15.0, lease_ms=round(LEASE_S * 1000),
            max_replayed_tokens=64, follows_numerics=scenario.follows_numerics,
            max_tokens_ahead=scenario.max_tokens_ahead,
        )  # fmt: skip
        self.sessions = WatchedSessions(
            routes, self.plane, limits, TaskGroup(), metrics.count_recovery,
            standby="all" if scenario.has_standbys else "off",
        )  # fmt: skip
        self.transcripts = Transcripts(control, LEASE_S, TaskGroup())
        limits_of_model = ModelLimits(
            4096,
            scenario.model.vocab_size,
            MOST_NEW_TOKENS,
            frozenset([scenario.model.eos_token_id]),
            growth_tokens=GROWTH_TOKENS,
        )
        widths = TokenWidths((0,), (0,), (0,))
        factory = AnswerFactory(ToyTokenizer(), limits_of_model, blocks_pb2.Drafts(max_tokens=3), widths)
        quotas = QuotaEnforcer(None, metrics)
        grammars = GrammarProcess(ToyTokenizer(), scenario.model.vocab_size, (), metrics.grammars)
        entrance = Entrance(quotas, Admission(WaitingLine(64, 64)), grammars, metrics)
        names = ModelNames([MODEL], placement)
        self.answering = WatchedAnswering(entrance, self.sessions, names, factory, self.transcripts)


class Cluster:
    """All processes of a scenario.

    Attributes:
        faults: the scenario's, and what its mishaps have become so far.
        begun: those of them that have begun.
    """

    def __init__(self, loop: VirtualLoop, scenario: Scenario) -> None:
        self.loop = loop
        self.scenario = scenario
        self.faults = [*scenario.faults]
        self.begun: list[Fault] = []
        self.network = Network(loop, scenario.seed)
        self.redis = SimulatedRedis(loop)
        self.rpc_metrics = RpcMetrics(CollectorRegistry())
        self.processes: list[Process] = []
        self.routers = [self.new(Router(self, number)) for number in range(scenario.num_routers)]
        self.servers = [self.new(Server(self, number, span)) for number, span in enumerate(scenario.spans)]
        self.clients = [self.new(Client(self, number)) for number in range(scenario.num_clients)]

    def new(self, service: Any) -> Any:
        """Takes note of a process, so that it is dissolved at the end."""
        self.processes.append(service.process)
        return service

    # Whatever was killed twice starts again once.

    def restart_server(self, number: int) -> None:
        if self.servers[number].process.is_dead:
            self.servers[number] = self.new(Server(self, number, self.scenario.spans[number]))

    def restart_router(self, number: int) -> None:
        if self.routers[number].process.is_dead:
            self.routers[number] = self.new(Router(self, number))

    def restart_client(self, number: int) -> None:
        if self.clients[number].process.is_dead:
            self.clients[number] = self.new(Client(self, number))

    async def dissolve(self) -> None:
        """Ends everything that still runs."""
        for process in self.processes:
            process.dissolve()
        for _ in range(3):
            tasks = [task for process in self.processes for task in process.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=1.0)
