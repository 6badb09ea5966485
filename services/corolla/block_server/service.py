"""A block server as a table of its parts, in the order in which they start."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from corolla.block_server.adapters import Adapters
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.drain import Drain
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import Identity
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.handover.sender import PART_BYTES, PART_BYTES_OF_GPUS, HandoverLinks, HandoverSender
from corolla.block_server.handover.standbys import Standbys
from corolla.block_server.hop_session import HopSession
from corolla.block_server.meetings import Meetings
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.model_files import ModelFiles
from corolla.block_server.mtp_drafts import MtpDrafts
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.page_guarantees import PageGuarantees
from corolla.block_server.peers import PeerTable
from corolla.block_server.periodic_tasks import PeriodicTasks
from corolla.block_server.registration import Order, Registration
from corolla.block_server.relay import Relay
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import AdminEndpoint, BlockServicer
from corolla.block_server.sessions import SessionTable
from corolla.block_server.settings import MAX_PART_TOKENS, BlockServerSettings
from corolla.block_server.span_loader import FEWER_PAGES, FEWER_WEIGHTS, SpanLoader
from corolla.block_server.spare_weights import Keeping, SpareWeights
from corolla.block_server.start_progress import StartProgress
from corolla.block_server.step_admission import StepWork
from corolla.block_server.step_spans import StepSpans
from corolla.cache.store import SessionCache
from corolla.chassis.addresses import host_port
from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import call_path
from corolla.chassis.lifecycle import fail
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.parts import Part, Parts
from corolla.chassis.processors import available_cores, is_cpu
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.tenant_limits import QuotaTable
from corolla.chassis.tracing import spans
from corolla.compute.compute_thread import ComputeThread
from corolla.compute.device import (
    device_id,
    device_name,
    memory_for,
    memory_now,
    memory_of,
    open_device,
    reserved_bytes,
)
from corolla.compute.device_memory import DeviceMemory
from corolla.compute.memory_bound import MemoryBound
from corolla.compute.numerics import kind_of, numerics_of
from corolla.compute.speed import Speed, measure_bandwidth, measure_decode_step
from corolla.models.edges import head_bytes
from corolla.models.hub import Hub
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.v1 import blocks_pb2, router_pb2
from corolla.wire.network import Network
from corolla.wire.numerics import UNKNOWN, Numerics
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES, tensor_type

log = logging.getLogger(__name__)

MAX_INLINE_S: Final = 0.01
"""The longest decode step that runs on the event loop. Control frames may have to wait that long."""
_MAX_QUEUED_STEPS: Final = 1024
"""The most steps that wait; the server refuses more. The sessions for which there are pages queue far fewer steps."""

_MOST_LOOKS: Final = 60
"""After as many seconds in one step, a device counts as hung."""

_KERNEL_SETTINGS: Final = ("attention", "cuda_graphs", "fused_blocks", "page_tokens", "products")
"""The settings that choose kernels and do not follow from the fingerprint."""

_SERVICE = blocks_pb2.DESCRIPTOR.services_by_name["BlockService"]


class BlockServer:
    """One incarnation of a block server.

    Args:
        span: the blocks to hold if the settings leave them to the router; None: the router chooses.
        network: connects to routers, next hops and servers that take sessions over; None: as the settings say.
        max_inline_s: shorter decode steps are computed on the event loop; 0: none.
        max_tokens_per_frame: the most tokens of one step; None: as the settings say.
        new_registration: makes the registration; see `Registration`.
        spares: the weights that the process keeps in addition to its span; None: none.
        speed: what an earlier incarnation measured here; None: it is measured.

    Attributes:
        leaves_at_once: whether `stop` waits for no client; see `Drain.drain`.
        parts: the parts of the server, and what the start has done so far.
        registry: the server's metrics, which can be read after it has stopped, too.

    Raises:
        StartupError: a port is taken; the server has then released its other ports.
    """

    def __init__(
        self,
        settings: BlockServerSettings,
        span: Span | None = None,
        *,
        network: Network | None = None,
        max_inline_s: float = MAX_INLINE_S,
        max_tokens_per_frame: int | None = None,
        new_registration: Callable[..., Registration] = Registration,
        spares: SpareWeights | None = None,
        speed: Speed | None = None,
    ) -> None:
        self.settings = settings
        self.leaves_at_once = False
        self._spares = spares or SpareWeights(0)
        self._placed: Sequence[router_pb2.PlacedServer] = ()
        self._earlier_speed = speed
        self._new_registration = new_registration
        self._max_tokens_per_frame = max_tokens_per_frame or settings.max_tokens_per_frame
        self._max_inline_s = max_inline_s
        self._wanted = settings.span or span
        network = self._network = network or Network.from_folder(settings.tls_dir)
        self.server_id = secrets.token_hex(16)
        self.registry = new_registry()
        self._metrics = BlockServerMetrics(self.registry)
        self._rpc_metrics = RpcMetrics(self.registry)
        self._metrics_endpoint = MetricsEndpoint(
            self.registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        with ExitStack() as taken:
            taken.callback(self._metrics_endpoint.close)
            self._listener = network.listen(settings.host, settings.port)
            taken.callback(self._listener.release)
            # The gRPC port is taken last: only `stop` releases it, which needs a completely built server.
            self._rpc = network.rpc_server(
                settings.host, settings.control_port, self._rpc_metrics, with_reflection=settings.reflection
            )
            taken.pop_all()
        self._tasks = TaskGroup(self._fail, TaskMetrics(self.registry))
        # The tasks that use the engine, which end before it.
        self._work = self._tasks.subgroup()
        network.start_renewal(self._tasks)
        self._peers = PeerTable()
        self._scheduler: Scheduler[StepWork] = Scheduler(
            settings.num_batch_tokens,
            _MAX_QUEUED_STEPS,
            max_prefill_tokens_during_decode=settings.prefill_tokens_during_decode,
        )
        self._compute_thread = ComputeThread()
        self._hub = Hub(patience_s=settings.hub_patience_s)
        self._loader = SpanLoader(settings, self._hub, self._max_tokens_per_frame, self._metrics.grammars)
        self._numerics: Numerics = UNKNOWN
        self._kernels = ""
        self._progress: StartProgress | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._adapters: Adapters | None = None
        self._has_place, self._num_moved, self._num_left = False, 0, 0
        self._admin = AdminEndpoint(settings.admin_port, self._rpc_metrics, network)
        self.parts = Parts(
            Part("metrics port", stop=self._metrics_endpoint.close),
            Part("tasks", stop=self._tasks.close),
            Part("compute thread", stop=self._compute_thread.close),
            Part("control port", stop=lambda: self._rpc.stop(0)),
            Part("data port", stop=self._listener.close),
            Part("metrics", self._metrics_endpoint.start, ["metrics port"]),
            Part("admin", self._start_admin, ["data port", "control port", "metrics port"], self._end_admin, "ports"),
            Part("reading", self._begin_reading, stop=self._end_reading),
            Part("device", self._open_device, ["compute thread"], stage="device"),
            Part("checkpoint", self._find_checkpoint, ["reading"], stage="model"),
            Part("speed", self._measure_speed, ["checkpoint", "device"]),
            Part("registration", self._make_registration, ["speed", "data port"], self._end_registration, "kernels"),
            Part("place", self._take_place, ["registration", "control port", "tasks"], stage="place"),
            Part("weights", self._load_weights, ["place"], stage="weights"),
            Part("runner", self._make_runner, ["weights"], stage="keys and values"),
            Part("sessions", self._make_sessions, ["runner"]),
            Part("engine", self._make_engine, ["sessions"], self._end_engine),
            Part("first step", self._compute_a_step, ["engine"], stage="step"),
            Part("servicer", self._make_servicer, ["first step"]),
            Part("drain", self._make_drain, ["servicer"]),
            Part("iterations", self._start_iterations, ["servicer"]),
            Part("data plane", self._serve_callers, ["iterations"], self._end_callers),
            Part("meetings", self._meet_others, ["data plane"]),
            Part("readiness", self._begin_to_serve, ["meetings", "drain"], self._leave, "serving"),
        )

    @property
    def port(self) -> int:
        """The port of the data plane."""
        return self._listener.port

    @property
    def control_port(self) -> int:
        """The port of gRPC."""
        return self._rpc.port

    @property
    def metrics_port(self) -> int:
        return self._metrics_endpoint.port

    @property
    def address(self) -> str:
        return host_port(self.settings.reachable_host, self.port)

    @property
    def sessions(self) -> tuple[HopSession[SessionCache], ...]:
        """The sessions that the server holds now; empty before it has started."""
        return tuple(self._sessions) if self.has_started else ()

    @property
    def has_started(self) -> bool:
        """True once the server has loaded its span and begun to compute."""
        return "iterations" in self.parts.started

    async def start(self) -> None:
        """Registers for a span, loads it and begins to serve it."""
        await self.parts.start()
        log.info(
            "ready",
            extra={
                "address": self.address,
                "blocks": str(self._span),
                "pages": self._runner.store.pool.num_pages,
                "numerics": str(self._numerics),
                "stages_s": {stage.name: round(stage.seconds, 2) for stage in self.parts.stages},
            },
        )

    async def stop(self) -> None:
        """Hands sessions over, leaves the placement and frees everything."""
        # Parts wait for threads when they stop, and a thread may wait for the hub or other servers.
        self._hub.stop()
        if self._loader.model_files is not None:
            self._loader.model_files.stop()
        await self._rpc.not_ready()
        await self.parts.stop()

    async def not_serving(self) -> None:
        """Makes the health service answer NOT_SERVING from now on."""
        await self._rpc.not_ready()

    def _fail(self) -> None:
        fail(self.not_serving)

    @property
    def speed(self) -> Speed:
        """What the start has measured."""
        return self._speed

    async def order(self) -> Order:
        """Waits until the router wants this server to hold another span. The server must have started."""
        return await self._registration.order()

    async def fetch(self, order: Order) -> bool:
        """Fetches the files of another span while this one is served. Returns whether the router still wants the move.

        Raises:
            StartupError: the files cannot be fetched.
        """
        await asyncio.to_thread(self._loader.fetch, self._checkpoint, order.span)
        return await self._registration.still_ordered(order)

    async def _start_admin(self) -> str:
        await self._admin.start()
        return f"{self.port}, {self.control_port}, {self.metrics_port}"

    async def _end_admin(self) -> None:
        await self._admin.stop(self._num_left)

    def _begin_reading(self) -> None:
        settings = self.settings
        if settings.manifest is not None:
            self._loader.model_files = ModelFiles(settings.manifest, settings.model, settings.router, self._network)
        # The checkpoint is read while the driver of the device starts.
        self._reading = asyncio.ensure_future(asyncio.to_thread(self._loader.find_checkpoint))

    async def _end_reading(self) -> None:
        self._reading.cancel()
        if self._loader.model_files is not None:
            await self._loader.model_files.close()

    async def _open_device(self) -> str:
        self._device = await self._compute_thread.run(open_device, self.settings.device)
        return device_name(self._device)

    async def _find_checkpoint(self) -> str:
        self._checkpoint, self._fingerprint = await self._reading
        checkpoint = self._checkpoint
        return f"{checkpoint.name}, {checkpoint.num_blocks} blocks, fingerprint {self._fingerprint}"

    async def _measure_speed(self) -> None:
        if self._earlier_speed is not None:
            self._speed = self._earlier_speed
            await self._compute_thread.run(torch.set_num_threads, self._speed.num_threads)
            return
        settings, device = self.settings, self._device
        if settings.span is not None and device.type != "cpu":
            # The threads would slow down a CPU, on which a block is measured next.
            self._loader.read_ahead(self._checkpoint, settings.span)
        with memory_for("a block's weights", device, FEWER_WEIGHTS):
            self._speed = await self._compute_thread.run(self._loader.measure, self._checkpoint)

    async def _make_registration(self) -> str:
        memory = await self._compute_thread.run(memory_of, self._device)
        self._description = await asyncio.to_thread(self._describe, memory)
        self._registration = self._new_registration(
            self.settings.router, self._description, self._load, self._network.channels, on_placement=self._on_placement
        )
        self._registration.is_hurried = lambda: bool(self._spares.spans)
        return f"one block computes {self._speed.decode_tokens_per_second:.0f} tokens/s one at a time"

    async def _end_registration(self) -> None:
        await self._give_place_back()
        await self._registration.close()

    async def _take_place(self) -> str:
        self._rpc.announce(_SERVICE)
        await self._rpc.start()
        # A router may have counted a registration whose answer never came.
        self._has_place = True
        self._span = await self._registration.register(self._wanted)
        self._heartbeats = self._tasks.start_essential(self._registration.run, "heartbeats")
        extra = {"model": self._checkpoint.name, "blocks": str(self._span), "threads": self._speed.num_threads}
        log.info("loading", extra=extra)
        return f"blocks {self._span}"

    async def _give_place_back(self) -> None:
        """Leaves the placement, once."""
        if not self._has_place:
            return
        self._has_place = False
        if self._heartbeats is not None:
            # A heartbeat after deregistration would register the server again.
            self._tasks.cancel(self._heartbeats)
            await asyncio.wait({self._heartbeats})
        await self._registration.deregister(self._num_moved, self._num_left)

    async def _load_weights(self) -> str:
        device, span = self._device, self._span
        await asyncio.to_thread(self._loader.fetch, self._checkpoint, span)
        self._progress = await asyncio.to_thread(
            StartProgress.of, self._checkpoint, self._loader.tensors_of(self._checkpoint, span)
        )
        with memory_for(f"the weights of blocks {span}", device, FEWER_WEIGHTS):
            self._bandwidth = (
                await self._compute_thread.run(measure_bandwidth, device) if device.type == "cuda" else None
            )
            weights = await self._spares.take(span, self._fingerprint)
            if weights is None:
                weights = await self._compute_thread.run(self._loader.load_weights, self._checkpoint, span)
            self._shared = await self._compute_thread.run(self._loader.load_shared, self._checkpoint, span, weights.mtp)
        self._weights, self._model, self._edges = weights, weights.model, weights.edges
        return f"{weights.num_bytes / 2**30:.2f} GiB on {self._model.device}"

    @property
    def _has_head(self) -> bool:
        return self._edges is not None and self._edges.has_head

    async def _make_runner(self) -> str:
        # Weights come first: a lack of memory is then reported as what it is.
        with memory_for("the keys and values of sessions", self._device, FEWER_PAGES):
            self._runner, recorded_bytes = await self._compute_thread.run(
                self._loader.make_runner,
                self._weights,
                self._checkpoint,
                self._speed.cache_bytes_per_token,
                self._shared.draft_model,
            )
        runner = self._runner
        recorded_rows = 0 if runner.decode_graphs is None else runner.decode_graphs.max_rows
        self._kernels = runner.kernel_choices.summary(recorded_rows)
        if self._bandwidth is not None:
            self._follow_device(self._bandwidth, recorded_bytes)
        return f"{runner.store.pool.num_pages} pages, attention by {runner.backend.name}"

    def _follow_device(self, bandwidth: float, recorded_bytes: int) -> None:
        settings, store, device = self.settings, self._runner.store, self._device
        weight_bytes, page_bytes = self._weights.num_bytes, store.page_bytes * store.pool.num_pages
        num_head_bytes = head_bytes(self._checkpoint, DTYPES[settings.dtype], settings.quantization)
        self._metrics.follow_device(
            lambda: memory_now(device).by_use(weight_bytes, page_bytes, recorded_bytes, reserved_bytes(device)),
            MemoryBound(
                bandwidth,
                len(self._span),
                self._model.nbytes,
                num_head_bytes if self._has_head else 0,
                store.bytes_by_window,
            ),
        )

    async def _make_engine(self) -> None:
        neighbours = self._neighbours = Neighbours(self._registration.placement, self._work)
        self._work.start_restartable(neighbours.run, "neighbours")
        new_relay = partial(
            Relay, self._fingerprint, self._peers, connect=self._network.connect, neighbours=neighbours,
            on_lost=lambda address: self._meetings.lost(address),
        )  # fmt: skip
        settings, num_threads, on_cpu = self.settings, self._speed.num_threads, is_cpu(self.settings.device)
        num_sampling_threads = 1
        if self._span.end == self._checkpoint.num_blocks:
            # While a GPU computes the blocks, all CPU cores are free for grammars. On a CPU, these use as many threads
            # as the blocks use.
            num_sampling_threads = num_threads if on_cpu else settings.threads or available_cores()
        parts = self._weights.mtp
        self.engine = Engine(
            self._runner, self._scheduler, self._sessions, self._outputs, self._peers, new_relay, self._metrics,
            fail=self._fail, edges=self._edges,
            spans=StepSpans(self.server_id, self.address) if spans.is_collected() else None,
            # The event loop computes a step only if one thread is enough, since it has no helper threads. On another
            # device it launches recorded steps, since to launch others takes longer than sockets should wait.
            max_inline_s=self._max_inline_s if num_threads == 1 and on_cpu else 0.0,
            launches_inline=bool(self._max_inline_s) and self._runner.decode_graphs is not None,
            num_sampling_threads=num_sampling_threads,
            max_microbatches=settings.max_microbatches, num_devices=neighbours.num_devices,
            compute_thread=self._compute_thread,
            # A step of a large model may take that long if a CPU computes it.
            most_looks=0 if on_cpu else _MOST_LOOKS,
            mtp=None if parts is None else MtpDrafts(self._runner, parts, self._checkpoint.num_blocks),
        )  # fmt: skip

    async def _end_engine(self) -> None:
        await self._work.close()
        self.engine.close()

    async def _compute_a_step(self) -> str:
        engine, runner = self.engine, self._runner
        with memory_for("the tensors of a step", self._device, FEWER_PAGES):
            await self._warm_up()
        step_s = await self._compute_thread.run(measure_decode_step, runner)
        engine.decode_speed.observe(step_s, len(self._span))
        # The next heartbeats announce the numerics.
        self._numerics = await self._compute_thread.run(numerics_of, runner, self._edges)
        self._metrics.numerics.labels(str(self._numerics)).set(1)
        return f"{step_s * 1e3:.2f} ms for one token, {self._kernels}; numerics {self._numerics}"

    @property
    def _max_part_tokens(self) -> int:
        return min(MAX_PART_TOKENS, self._max_tokens_per_frame)

    def _make_servicer(self) -> None:
        settings, checkpoint, sessions, engine = self.settings, self._checkpoint, self._sessions, self.engine
        identity = Identity(
            server_id=self.server_id, span=self._span, model=checkpoint.name, fingerprint=self._fingerprint,
            dtype_name=settings.dtype, dtype=tensor_type(DTYPES[settings.dtype]), hidden_size=checkpoint.hidden_size,
            max_tokens_per_frame=self._max_tokens_per_frame,
            prefix_page_tokens=settings.num_page_tokens if settings.prefix_cache else 0,
            keeps_states=bool(self._runner.store.recurrent),
            num_model_blocks=checkpoint.num_blocks, vocab_size=checkpoint.vocab_size,
            context_length=checkpoint.context_length, cuts_are_equal=self._runner.kernel_choices.cuts_are_equal,
        )  # fmt: skip
        receiver = HandoverReceiver(
            self._span, sessions, engine, self._metrics, self._work, max_part_tokens=self._max_part_tokens
        )
        if settings.adapters_mib:
            self._adapters = Adapters(
                self._model, checkpoint.num_blocks, self._runner.stacks,
                max_bytes=settings.adapters_mib << 20, folder=settings.adapters_dir, hub=self._hub,
                ask_router=self._registration.placement,
                in_use=lambda: [each.request.adapter for each in sessions if each.request.adapter is not None],
                between_iterations=engine.between_iterations, tasks=self._work,
            )  # fmt: skip
        self._sender = HandoverSender(
            self._span, sessions, engine, max_part_tokens=self._max_part_tokens,
            max_part_bytes=PART_BYTES if self._device.type == "cpu" else PART_BYTES_OF_GPUS,
        )  # fmt: skip
        self._standbys = Standbys(
            sessions, self._sender, HandoverLinks(self._network.connect, self._fingerprint), self._peers,
            self._neighbours, self._work, self._metrics,
        )  # fmt: skip
        self._meetings: Meetings = Meetings(
            self.address, self._fingerprint, self._neighbours, self._network.connect, self._registration.placement,
            self._work, self._registration.report, self._registration.request_heartbeat,
        )  # fmt: skip
        files = self._loader.model_files
        self._servicer = BlockServicer(
            identity, engine, sessions, self._outputs, self._peers, self._runner.store, receiver, self._work,
            self._shared, self._rpc_metrics.error, self._network.capabilities(self._fingerprint), self._adapters,
            lambda: self._registration.num_heartbeats,
            self._standbys if settings.prefix_cache else None, self._meetings,
            files.sender(self._work, lambda: sessions.num_running_tokens > 0) if files is not None else None,
        )  # fmt: skip

    def _make_drain(self) -> None:
        self._drain = Drain(
            self._description, self._sessions, self.engine, self._peers, self._registration, self._sender,
            HandoverLinks(self._network.connect, self._fingerprint), self._metrics, self._standbys, self._numerics,
        )  # fmt: skip

    def _start_iterations(self) -> None:
        self._work.start_essential(self.engine.run, "engine")
        self.periodic_tasks = PeriodicTasks(
            self.engine, self._scheduler, self._sessions, self._outputs, self._peers, self._metrics,
            standby_lags=lambda: self._standbys.lags,
        )  # fmt: skip
        self._work.start_essential(self.periodic_tasks.run, "periodic_tasks")

    async def _serve_callers(self) -> None:
        handler = self._network.service_handler(_SERVICE, self._servicer, self._rpc_metrics)
        self._rpc.add(_SERVICE, handler)
        await self._listener.start(self._servicer.accept, trust=self._network.callers)

    async def _end_callers(self) -> None:
        # The time for draining is over, and streams do not end by themselves.
        await self._listener.close()
        await self._rpc.stop(0)

    async def _meet_others(self) -> None:
        await self._meetings.meet_all()
        self._work.start_restartable(self._meetings.run, "meetings")

    async def _begin_to_serve(self) -> None:
        await self._rpc.ready()
        self._registration.state = router_pb2.SERVER_STATE_READY
        self._registration.request_heartbeat()
        self._metrics.spare_bytes.set_function(lambda: self._spares.num_bytes)
        if self._spares.max_bytes:
            self._work.start_restartable(partial(self._spares.run, self._keeping()), "spare_weights")

    def _keeping(self) -> Keeping:
        loader, checkpoint, store = self._loader, self._checkpoint, self._runner.store

        def num_unused_bytes() -> int:
            # The pages of a GPU lie elsewhere.
            return store.page_bytes * store.pool.num_unused if self._device.type == "cpu" else 0

        return Keeping(
            self.server_id, lambda: self._placed, partial(loader.spare_bytes, self._description, self._speed),
            num_unused_bytes, partial(loader.load_spare, checkpoint),
        )  # fmt: skip

    async def _leave(self) -> None:
        try:
            await self._drain.drain(self.settings.grace_s, at_once=self.leaves_at_once)
        except Exception as failure:
            # The server must leave the placement whatever failed here.
            log.error("sessions could not be handed over", extra={"where": call_path(failure)})
        self._num_moved, self._num_left = self._drain.num_moved, self._drain.num_left
        await self._admin.stop(self._num_left)
        await self._give_place_back()

    def _describe(self, memory: DeviceMemory | None) -> router_pb2.ServerDescription:
        """The description of this server for the router. `memory` is that of its device before it has weights."""
        settings, checkpoint, speed = self.settings, self._checkpoint, self._speed
        capacity = min(settings.capacity_blocks or checkpoint.num_blocks, checkpoint.num_blocks)
        if settings.span is not None:
            capacity = len(settings.span)
        return router_pb2.ServerDescription(
            server_id=self.server_id,
            address=self.address,
            model=checkpoint.name,
            fingerprint=self._fingerprint,
            dtype=self._loader.weight_format(checkpoint),
            num_model_blocks=checkpoint.num_blocks,
            capacity_blocks=capacity,
            decode_tokens_per_second=speed.decode_tokens_per_second,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            cache_token_bytes=speed.cache_bytes_per_token,
            head_blocks=speed.head_blocks,
            weight_blocks=self._loader.weight_bytes(memory, checkpoint) / speed.block_bytes,
            tied_edges=checkpoint.has_tied_edges,
            draft_blocks=self._loader.draft_blocks(checkpoint, speed.block_bytes),
            zone=settings.zone,
            node=settings.node,
            pod_uid=settings.pod_uid,
            movable=settings.span is None,
            device_id=device_id(torch.device(settings.device)),
            kind=kind_of(
                torch.device(settings.device),
                DTYPES[settings.dtype],
                {name: str(getattr(settings, name)) for name in _KERNEL_SETTINGS},
            ),
            fingerprint_parts=checkpoint.fingerprint_parts(
                settings.dtype, settings.quantization, settings.kv_cache_dtype
            ),
        )

    def _make_sessions(self) -> None:
        settings, store = self.settings, self._runner.store
        self._outputs = BoundaryActivations(self._loader.boundary_activation_bytes(self._runner))
        sessions = self._sessions = SessionTable(
            store.pool,
            self._runner.new_cache,
            max_prompt_bytes=settings.prompt_mib << 20,
            on_forget=self._outputs.forget,
        )
        if (file := settings.quotas_file) is None:
            return

        def take(contents: Contents) -> None:
            wanted = {
                tenant: sessions.pages_of_any(num_tokens)
                for tenant, num_tokens in QuotaTable.parse(contents[0]).guaranteed("guaranteed_tokens").items()
            }
            guarantees = sessions.guarantees = PageGuarantees(wanted, sessions.pool.num_pages)
            if guarantees.num_missing:
                log.error(
                    "more pages are guaranteed than this server has; raise its COROLLA_KV_CACHE_MIB",
                    extra={"pages_missing": guarantees.num_missing},
                )

        files = WatchedFiles("COROLLA_QUOTAS_FILE", file.parent, (file.name,), take, named=file)
        self._tasks.start_restartable(files.run, "watched_files")

    def _on_placement(self, placement: router_pb2.Placement) -> None:
        self._placed = placement.servers
        if self._adapters is not None:
            self._adapters.on_placement(placement)

    async def _warm_up(self) -> None:
        """Computes a token in each thread that will compute, and makes sure that the largest step has room, too."""
        engine, device = self.engine, self._device
        step_bytes = self._loader.step_bytes(self._checkpoint, has_head=self._has_head)
        await self._compute_thread.run(engine.warm_up)
        if engine.launches_inline:
            # Each thread has a current device, and takes workspaces of its own.
            open_device(self.settings.device)
            engine.warm_up()
        memory = await self._compute_thread.run(memory_of, device)
        if memory is not None and memory.num_free < step_bytes:
            raise StartupError(
                f"the largest step takes {step_bytes >> 20} MiB, and {memory.num_free >> 20} MiB of {device} are free "
                f"next to weights and pages: {FEWER_PAGES}"
            )

    def _load(self) -> router_pb2.ServerLoad:
        if "servicer" not in self.parts.started:
            progress, files = self._progress, self._loader.model_files
            if progress is not None:
                return router_pb2.ServerLoad(start_share=progress.share, start_seconds_left=progress.seconds_left)
            return router_pb2.ServerLoad(start_seconds_left=files.seconds_left if files is not None else 0.0)
        pool, standbys = self._sessions.pool, self._standbys
        return router_pb2.ServerLoad(
            num_sessions=len(self._sessions),
            num_pages=pool.num_pages,
            num_free_pages=self._sessions.num_available_pages,
            max_session_tokens=self._sessions.max_session_tokens,
            num_queued_steps=len(self._scheduler),
            decode_step_seconds=self.engine.decode_step_seconds,
            decode_tokens_per_second=self.engine.decode_speed.tokens_per_second,
            decode_batch_rows=self.engine.decode_batch_rows,
            numerics=str(self._numerics),
            kernels=self._kernels,
            num_tokens_at_risk=max(0, self._sessions.num_running_tokens - standbys.num_copied_tokens),
            standby_bytes=standbys.num_bytes,
            standby_state_bytes=standbys.num_state_bytes,
            beginnings=self._sessions.announced.newest_first(),
            spare_spans=[span.to_message() for span in self._spares.spans],
            unreachable=self._meetings.unreachable,
        )
