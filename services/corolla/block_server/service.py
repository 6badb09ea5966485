"""Builds a block server from its parts (the composition root), starts it and stops it."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch

from corolla.block_server.adapters import Adapters
from corolla.block_server.admitted_step import StepWork
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.drain import Drain
from corolla.block_server.engine import Engine, ProcessorUse
from corolla.block_server.frame_checks import Identity
from corolla.block_server.grammars import Grammars
from corolla.block_server.handover.receiver import HandoverReceiver
from corolla.block_server.handover.sender import PART_BYTES, PART_BYTES_OF_GPUS, HandoverSender
from corolla.block_server.hop_session import SessionFacts
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.neighbours import Neighbours
from corolla.block_server.page_guarantees import PageGuarantees
from corolla.block_server.peers import PeerTable
from corolla.block_server.periodic_tasks import PeriodicTasks
from corolla.block_server.prompt_share import PromptShare
from corolla.block_server.registration import Registration
from corolla.block_server.relay import Relay
from corolla.block_server.row_sampling import SharedBySamplers
from corolla.block_server.scheduler import Scheduler
from corolla.block_server.servicer import BlockServicer
from corolla.block_server.servicer_admin import AdminEndpoint
from corolla.block_server.sessions import SessionTable
from corolla.block_server.settings import MAX_PART_TOKENS, BlockServerSettings
from corolla.block_server.start_stages import StartStages
from corolla.block_server.step_spans import StepSpans
from corolla.cache.layout import NUM_KEPT_STATES, CacheLayout, LayerGroups
from corolla.cache.store import SessionCache
from corolla.chassis.errors import StartupError
from corolla.chassis.handlers import call_path
from corolla.chassis.host_memory import available_bytes
from corolla.chassis.lifecycle import fail
from corolla.chassis.metrics import MetricsEndpoint, RpcMetrics, TaskMetrics, new_registry
from corolla.chassis.processors import available_cores, is_cpu
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.tenant_limits import QuotaTable
from corolla.chassis.tracing import spans
from corolla.chassis.weight_formats import weight_format
from corolla.compute.agreement import LayerCheck, check_small_copy
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
from corolla.compute.device_memory import SHARE_OF_ACTIVATIONS, DeviceMemory
from corolla.compute.graph_choice import choose_graphs
from corolla.compute.memory_bound import MemoryBound
from corolla.compute.numerics import numerics_of
from corolla.compute.sizes import step_size
from corolla.compute.span_runner import SpanRunner
from corolla.compute.speed import Speed, measure_bandwidth, measure_decode_step, measure_speed, state_bytes
from corolla.decoding.draft_model import DraftModel, num_weights
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.edges import Edges, fetch_edges, head_bytes, load_edges
from corolla.models.families import pageless_layers
from corolla.models.hub import Hub
from corolla.models.read_ahead import ReadAhead, tensors_of
from corolla.models.span_model import SpanModel, fetch_span, load_span, weight_types
from corolla.trust.watched_files import Contents, WatchedFiles
from corolla.v1 import blocks_pb2, router_pb2
from corolla.wire.network import Network
from corolla.wire.numerics import UNKNOWN
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES, tensor_type

log = logging.getLogger(__name__)

_MAX_TAKEN_BACK: Final = 128
"""How many of its newest tokens a session can always take back: layers with a sliding window keep at least this many
tokens more than the window needs. A ring runs 32 tokens ahead of its reader; its last step may have 64 draft tokens."""

MAX_INLINE_S: Final = 0.01
"""The longest decode step that runs on the event loop. Control frames may have to wait that long."""
_CACHE_BYTES_ON_CPUS: Final = 1 << 30
_ACTIVATION_BYTES_ON_CPUS: Final = 256 << 20
_MAX_QUEUED_STEPS: Final = 1024
"""The most steps that wait; the server refuses more. The sessions for which there are pages queue far fewer steps."""

_MOST_LOOKS: Final = 60
"""After as many seconds in one step, a device counts as hung."""

_FEWER_WEIGHTS: Final = (
    "hold fewer blocks (COROLLA_BLOCKS, COROLLA_CAPACITY_BLOCKS or COROLLA_WEIGHTS_MIB), or store weights in fewer "
    "bytes (COROLLA_DTYPE=bfloat16, or COROLLA_QUANTIZATION)"
)
_FEWER_PAGES: Final = "set COROLLA_KV_CACHE_MIB or COROLLA_MAX_BATCH_TOKENS to less, or hold fewer blocks"

_SERVICE = blocks_pb2.DESCRIPTOR.services_by_name["BlockService"]


class BlockServer:
    """One incarnation of a block server.

    Args:
        span: the blocks to hold if the settings leave them to the router; None: the router chooses.
        network: connects to routers, next hops and servers that take sessions over; None: as the settings say.
        max_inline_s: shorter decode steps are computed on the event loop; 0: none.
        max_tokens_per_frame: the most tokens of one step; None: as the settings say.
        new_registration: makes the registration; see `Registration`.

    Attributes:
        stages: what the start has done so far.
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
    ) -> None:
        self.settings = settings
        self.stages = StartStages()
        self._new_registration = new_registration
        self._max_tokens_per_frame = max_tokens_per_frame or settings.max_tokens_per_frame
        self._max_inline_s = max_inline_s
        self._wanted = settings.span or span
        network = self._network = network or Network.of(settings.tls_dir)
        self.server_id = secrets.token_hex(16)
        self.registry = new_registry()
        self._metrics = BlockServerMetrics(self.registry)
        self._metrics_endpoint = MetricsEndpoint(
            self.registry, settings.metrics_host, settings.metrics_port, lambda: self._rpc.is_serving
        )
        with ExitStack() as taken:
            taken.callback(self._metrics_endpoint.close)
            self._listener = network.listen(settings.host, settings.port)
            taken.callback(self._listener.release)
            # The gRPC port is taken last: only `stop` releases it, which needs a completely built server.
            self._rpc = RpcServer(
                settings.host,
                settings.control_port,
                with_reflection=settings.reflection,
                credentials=network.rpc_credentials(),
            )
            taken.pop_all()
        self._tasks = TaskGroup(self._fail, TaskMetrics(self.registry))
        network.start_renewal(self._tasks)
        self._peers = PeerTable()
        self._scheduler: Scheduler[StepWork] = Scheduler(
            settings.num_batch_tokens,
            _MAX_QUEUED_STEPS,
            max_prefill_tokens_during_decode=settings.prefill_tokens_during_decode,
        )
        self._sessions: SessionTable[SessionCache] | None = None
        self._new_runner = partial(
            SpanRunner,
            page_tokens=settings.num_page_tokens,
            attention=settings.attention,
            is_fused=settings.fused_blocks,
            products=settings.products,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        self._compute_thread = ComputeThread()
        self._numerics = UNKNOWN
        self._kernels = ""
        self._engine: Engine | None = None
        self._adapters: Adapters | None = None
        self._periodic_tasks: PeriodicTasks | None = None
        self._hub = Hub(patience_s=settings.hub_patience_s)
        self._checkpoint: Checkpoint | None = None
        self._read_ahead: ReadAhead | None = None
        self._registration: Registration | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._drain: Drain | None = None
        self._rpc_metrics = RpcMetrics(self.registry)
        self._admin = AdminEndpoint(settings.admin_host, settings.admin_port, self._rpc_metrics, network)

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
        return f"{self.settings.reachable_host}:{self.port}"

    @property
    def sessions(self) -> tuple[SessionFacts, ...]:
        """The sessions that the server holds now; empty before it has started."""
        return tuple(session.facts for session in self._sessions or ())

    @property
    def has_started(self) -> bool:
        """Whether the server has loaded its span and begun to serve."""
        return self._periodic_tasks is not None

    @property
    def engine(self) -> Engine:
        """The engine of a server that has started."""
        if self._engine is None:
            raise RuntimeError("this server has not started")
        return self._engine

    @property
    def periodic_tasks(self) -> PeriodicTasks:
        """The periodic tasks of a server that has started."""
        if self._periodic_tasks is None:
            raise RuntimeError("this server has not started")
        return self._periodic_tasks

    async def start(self) -> None:
        """Registers for a span, loads it and begins to serve it."""
        settings, network = self.settings, self._network
        self._metrics_endpoint.start()
        await self._admin.start()
        stages = self.stages
        stages.end(f"{self.port}, {self.control_port}, {self.metrics_port}")
        # The checkpoint is read while the driver of the device starts.
        finding = asyncio.create_task(asyncio.to_thread(self._find_checkpoint))
        try:
            device = await self._compute_thread.run(open_device, settings.device)
        except BaseException:
            self._hub.stop()
            finding.cancel()
            raise
        stages.end(device_name(device))
        checkpoint, fingerprint = await finding
        self._checkpoint = checkpoint
        dtype = DTYPES[settings.dtype]
        stages.end(f"{checkpoint.name}, {checkpoint.num_blocks} blocks, fingerprint {fingerprint}")
        if settings.span is not None and device.type != "cpu" and checkpoint.gguf is None:
            # The threads would slow down a CPU, on which a block is measured next.
            names = tensors_of(checkpoint, settings.span)
            self._read_ahead = ReadAhead(checkpoint.weight_index, names, available_bytes())
        with memory_for("a block's weights", device, _FEWER_WEIGHTS):
            speed = await self._compute_thread.run(
                measure_speed, checkpoint, dtype, settings.device, settings.quantization, settings.threads,
                self._new_runner,
            )  # fmt: skip
        memory = await self._compute_thread.run(memory_of, device)
        description = await asyncio.to_thread(self._description, checkpoint, fingerprint, speed, memory)
        stages.end(f"one block computes {speed.decode_tokens_per_second:.0f} tokens/s one at a time")
        registration = self._registration = self._new_registration(
            settings.router, description, self._load, network.channels, on_placement=self._on_placement
        )
        self._rpc.announce(_SERVICE)
        await self._rpc.start()
        span = await registration.register(self._wanted)
        self._heartbeats = self._tasks.start_essential(registration.run, "heartbeats")
        stages.end(f"blocks {span}")
        log.info("loading", extra={"model": checkpoint.name, "blocks": str(span), "threads": speed.num_threads})
        await self._serve(span, checkpoint, fingerprint, speed, description, registration, device)

    def _find_checkpoint(self) -> tuple[Checkpoint, str]:
        """The model's checkpoint and its fingerprint."""
        settings = self.settings
        checkpoint = Checkpoint.from_pretrained(settings.model, revision=settings.revision, hub=self._hub)
        check_small_copy(checkpoint, settings.num_page_tokens, is_fused=settings.fused_blocks)
        return checkpoint, checkpoint.fingerprint(settings.dtype, settings.quantization, settings.kv_cache_dtype)

    async def _serve(
        self,
        span: Span,
        checkpoint: Checkpoint,
        fingerprint: str,
        speed: Speed,
        description: router_pb2.ServerDescription,
        registration: Registration,
        device: torch.device,
    ) -> None:
        """Loads the span and begins to serve it."""
        settings, network, stages, dtype = self.settings, self._network, self.stages, DTYPES[self.settings.dtype]
        with memory_for(f"the weights of blocks {span}", device, _FEWER_WEIGHTS):
            bandwidth = await self._compute_thread.run(measure_bandwidth, device) if device.type == "cuda" else None
            model, edges, shared = await self._compute_thread.run(self._load_weights, checkpoint, span)
        weight_bytes = model.nbytes + (0 if edges is None else edges.nbytes)
        stages.end(f"{weight_bytes / 2**30:.2f} GiB on {model.device}")
        # Weights come first: a lack of memory is then reported as what it is.
        with memory_for("the keys and values of sessions", device, _FEWER_PAGES):
            runner, recorded_bytes = await self._compute_thread.run(
                self._make_runner, model, checkpoint, speed.cache_bytes_per_token, shared.draft_model
            )
        stages.end(f"{runner.store.pool.num_pages} pages, attention by {runner.backend.name}")
        recorded_rows = 0 if runner.decode_graphs is None else runner.decode_graphs.max_rows
        self._metrics.recorded_rows.set(recorded_rows)
        self._kernels = runner.kernel_choices.summary(recorded_rows)
        if bandwidth is not None:
            page_bytes = runner.store.page_bytes * runner.store.pool.num_pages
            has_head = edges is not None and edges.has_head
            self._metrics.follow_device(
                lambda: memory_now(device).by_use(weight_bytes, page_bytes, recorded_bytes, reserved_bytes(device)),
                MemoryBound(
                    bandwidth, len(span), model.nbytes,
                    head_bytes(checkpoint, dtype, settings.quantization) if has_head else 0,
                    runner.store.bytes_by_window,
                ),
            )  # fmt: skip
        outputs = BoundaryActivations(self._boundary_activation_bytes(runner))
        self._sessions = self._make_sessions(runner, outputs)
        neighbours = Neighbours(registration.placement, self._tasks)
        engine = self._engine = Engine(
            runner, self._scheduler, self._sessions, outputs, self._peers,
            self._relay_factory(fingerprint, neighbours), self._metrics,
            fail=self._fail, edges=edges,
            use=self._processor_use(runner, checkpoint, speed.num_threads, neighbours),
            spans=StepSpans(self.server_id, self.address) if spans.is_collected() else None,
        )  # fmt: skip
        with memory_for("the tensors of a step", device, _FEWER_PAGES):
            await self._warm_up(
                engine, device, self._step_bytes(checkpoint, has_head=edges is not None and edges.has_head)
            )
        step_s = await self._compute_thread.run(measure_decode_step, runner)
        engine.decode_speed.observe(step_s, len(span))
        await self._name_numerics(runner, edges)
        stages.end(f"{step_s * 1e3:.2f} ms for one token, {self._kernels}; numerics {self._numerics}")
        identity = Identity(
            server_id=self.server_id, span=span, model=checkpoint.name, fingerprint=fingerprint,
            dtype_name=settings.dtype, dtype=tensor_type(dtype), hidden_size=checkpoint.hidden_size,
            max_tokens_per_frame=self._max_tokens_per_frame,
            prefix_page_tokens=settings.num_page_tokens if settings.prefix_cache else 0,
            num_model_blocks=checkpoint.num_blocks, vocab_size=checkpoint.vocab_size,
            context_length=checkpoint.context_length,
        )  # fmt: skip
        most = min(MAX_PART_TOKENS, self._max_tokens_per_frame)
        receiver = HandoverReceiver(span, self._sessions, engine, self._metrics, self._tasks, max_part_tokens=most)
        self._adapters = self._make_adapters(runner, checkpoint, engine, self._sessions, registration)
        servicer = BlockServicer(
            identity, engine, self._sessions, outputs, self._peers, runner.store, receiver,
            self._tasks, shared, self._rpc_metrics.error, network.capabilities(fingerprint), self._adapters,
        )  # fmt: skip
        self._drain = Drain(
            description, self._sessions, engine, self._peers, registration,
            HandoverSender(
                span, self._sessions, engine, max_part_tokens=most,
                max_part_bytes=PART_BYTES if device.type == "cpu" else PART_BYTES_OF_GPUS,
            ),
            self._metrics, network.connect,
            self._numerics,
        )  # fmt: skip
        self._rpc.add(_SERVICE, network.service_handler(_SERVICE, servicer, self._rpc_metrics))
        self._tasks.start_essential(engine.run, "engine")
        self._periodic_tasks = PeriodicTasks(
            engine, self._scheduler, self._sessions, outputs, self._peers, self._metrics,
            page_bytes=lambda: runner.store.page_bytes,
        )  # fmt: skip
        self._tasks.start_essential(self._periodic_tasks.run, "periodic_tasks")
        await self._listener.start(servicer.accept, trust=network.callers)
        await self._rpc.ready()
        stages.end()
        registration.state = router_pb2.SERVER_STATE_READY
        registration.request_heartbeat()
        log.info(
            "ready",
            extra={
                "address": self.address,
                "blocks": str(span),
                "pages": runner.store.pool.num_pages,
                "numerics": str(self._numerics),
                "stages_s": {stage.name: round(stage.seconds, 2) for stage in stages.ended},
            },
        )

    async def _name_numerics(self, runner: SpanRunner, edges: Edges | None) -> None:
        """Announces the numerics with the next heartbeats."""
        self._numerics = await self._compute_thread.run(numerics_of, runner, edges)
        self._metrics.numerics.labels(str(self._numerics)).set(1)

    def _description(
        self, checkpoint: Checkpoint, fingerprint: str, speed: Speed, memory: DeviceMemory | None
    ) -> router_pb2.ServerDescription:
        """The description of this server for the router. `memory` is that of its device before it has weights."""
        settings = self.settings
        weight_bytes = settings.weights_mib << 20
        if not weight_bytes and memory is not None and settings.span is None:
            weight_bytes = memory.for_weights(
                (settings.kv_cache_mib << 20) or None,
                self._step_bytes(checkpoint, has_head=True),
                settings.adapters_mib << 20,
            )
            if not weight_bytes:
                raise StartupError(
                    f"COROLLA_DEVICE={settings.device} has {memory.num_free >> 20} MiB free, which leaves nothing for "
                    "weights; end other processes there, or set COROLLA_KV_CACHE_MIB, COROLLA_ADAPTERS_MIB or "
                    "COROLLA_MAX_BATCH_TOKENS to less"
                )
        capacity = min(settings.capacity_blocks or checkpoint.num_blocks, checkpoint.num_blocks)
        if settings.span is not None:
            capacity = len(settings.span)
        return router_pb2.ServerDescription(
            server_id=self.server_id,
            address=self.address,
            model=checkpoint.name,
            fingerprint=fingerprint,
            dtype=self._weight_format(checkpoint),
            num_model_blocks=checkpoint.num_blocks,
            capacity_blocks=capacity,
            decode_tokens_per_second=speed.decode_tokens_per_second,
            prefill_tokens_per_second=speed.prefill_tokens_per_second,
            head_blocks=speed.head_blocks,
            weight_blocks=weight_bytes / speed.block_bytes,
            tied_edges=checkpoint.has_tied_edges,
            draft_blocks=self._draft_blocks(speed.block_bytes),
            zone=settings.zone,
            pod_uid=settings.pod_uid,
            movable=settings.span is None,
            device_id=device_id(torch.device(settings.device)),
            fingerprint_parts=checkpoint.fingerprint_parts(
                settings.dtype, settings.quantization, settings.kv_cache_dtype
            ),
        )

    async def ordered_span(self) -> Span:
        """Waits until the router wants this server to hold another span. The server must have started."""
        if self._registration is None:
            raise RuntimeError("this server has not started")
        return await self._registration.ordered_span()

    async def fetch(self, span: Span) -> bool:
        """Fetches the files of another span while this one is served. Returns whether the router still wants the move.

        Raises:
            StartupError: the files cannot be fetched.
        """
        if self._registration is None or self._checkpoint is None:
            raise RuntimeError("this server has not started")
        await asyncio.to_thread(fetch_span, self._checkpoint, span)
        await asyncio.to_thread(partial(fetch_edges, self._checkpoint, **_ends_of(self._checkpoint, span)))
        if (drafting := await asyncio.to_thread(self._draft_checkpoint, self._checkpoint, span)) is not None:
            await asyncio.to_thread(drafting.fetch)
        return await self._registration.still_ordered(span)

    async def not_serving(self) -> None:
        """Makes the health service answer NOT_SERVING from now on."""
        await self._rpc.not_ready()

    def _fail(self) -> None:
        fail(self.not_serving)

    async def stop(self) -> None:
        """Hands sessions over, leaves the placement and frees everything."""
        self._hub.stop()
        await self._rpc.not_ready()
        if self._drain is not None:
            try:
                await self._drain.drain(self.settings.grace_s)
            except Exception as failure:
                # The server must leave the placement whatever failed here.
                log.error("sessions could not be handed over", extra={"where": call_path(failure)})
        num_moved, num_left = (self._drain.num_moved, self._drain.num_left) if self._drain is not None else (0, 0)
        await self._admin.stop(num_left)
        if self._heartbeats is not None:
            # A heartbeat after deregistration would register the server again.
            self._tasks.cancel(self._heartbeats)
            await asyncio.wait({self._heartbeats})
        if self._registration is not None:
            await self._registration.deregister(num_moved, num_left)
        # The time for draining is over, and streams do not end by themselves.
        await self._listener.close()
        await self._rpc.stop(0)
        await self._tasks.close()
        if self._engine is not None:
            self._engine.close()
        self._compute_thread.close()
        if self._registration is not None:
            await self._registration.close()
        self._metrics_endpoint.close()

    def _make_sessions(self, runner: SpanRunner, outputs: BoundaryActivations) -> SessionTable[SessionCache]:
        settings = self.settings
        sessions = SessionTable(
            runner.store.pool,
            runner.new_cache,
            max_prompt_bytes=settings.prompt_mib << 20,
            on_forget=outputs.forget,
        )
        if (file := settings.quotas_file) is None:
            return sessions

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
        return sessions

    def _make_adapters(
        self,
        runner: SpanRunner,
        checkpoint: Checkpoint,
        engine: Engine,
        sessions: SessionTable[SessionCache],
        registration: Registration,
    ) -> Adapters | None:
        settings = self.settings
        if not settings.adapters_mib:
            return None
        return Adapters(
            runner.model, checkpoint.num_blocks, runner.stacks,
            max_bytes=settings.adapters_mib << 20, folder=settings.adapters_dir, hub=self._hub,
            registered=registration.placement, in_use=lambda: sessions.adapters_in_use,
            between_iterations=partial(engine.between_iterations, max_released_pages=0),
            tasks=self._tasks, metrics=self._metrics,
        )  # fmt: skip

    def _on_placement(self, placement: router_pb2.Placement) -> None:
        if self._adapters is not None:
            self._adapters.on_placement(placement)

    def _relay_factory(
        self, fingerprint: str, neighbours: Neighbours
    ) -> Callable[[Callable[[blocks_pb2.Step], None]], Relay]:
        self._tasks.start_restartable(neighbours.run, "neighbours")
        return partial(Relay, fingerprint, self._peers, connect=self._network.connect, neighbours=neighbours)

    async def _warm_up(self, engine: Engine, device: torch.device, step_bytes: int) -> None:
        """Computes a token in each thread that will compute, and makes sure that the largest step has room, too."""
        await self._compute_thread.run(engine.warm_up)
        if engine.launches_inline:
            # Each thread has a current device, and takes workspaces of its own.
            open_device(self.settings.device)
            engine.warm_up()
        memory = await self._compute_thread.run(memory_of, device)
        if memory is not None and memory.num_free < step_bytes:
            raise StartupError(
                f"the largest step takes {step_bytes >> 20} MiB, and {memory.num_free >> 20} MiB of {device} are free "
                f"next to weights and pages: {_FEWER_PAGES}"
            )

    def _load_weights(self, checkpoint: Checkpoint, span: Span) -> tuple[SpanModel, Edges | None, SharedBySamplers]:
        settings = self.settings
        if self._read_ahead is not None:
            self._read_ahead.stop()
        model = load_span(
            checkpoint, span, dtype=DTYPES[settings.dtype], device=settings.device, quantization=settings.quantization
        )
        return model, self._load_edges(checkpoint, span), self._load_shared(checkpoint, span)

    def _make_runner(
        self, model: SpanModel, checkpoint: Checkpoint, cache_bytes_per_token: int, draft_model: DraftModel | None
    ) -> tuple[SpanRunner, int]:
        """The runner, and the bytes of the device that its recorded steps took."""
        settings = self.settings
        check = LayerCheck(model, settings.num_page_tokens)
        layout = CacheLayout(
            LayerGroups.of(model.windows, pageless_layers(model.config)),
            settings.num_page_tokens,
            cache_bytes_per_token,
            max(self._max_tokens_per_frame, _MAX_TAKEN_BACK),
            state_bytes(model, self._new_runner),
        )
        cache_bytes = self._cache_bytes(model, checkpoint)
        if draft_model is not None:
            # The draft model has room for as many tokens as the pages, within the same memory.
            token_bytes = layout.page_bytes // layout.page_tokens
            cache_bytes = cache_bytes * token_bytes // (token_bytes + draft_model.token_bytes())
        num_pages = self._num_pages(layout, cache_bytes)
        if draft_model is not None:
            draft_model.room.max_tokens = num_pages * settings.num_page_tokens
        may_replay = settings.cuda_graphs == "auto" and model.device.type == "cuda"
        runner = self._new_runner(
            model,
            num_pages=num_pages,
            max_step_tokens=layout.max_step_tokens,
            has_scratch_page=may_replay,
            max_stack_bytes=settings.adapters_mib << 20,
            num_state_pages=layout.num_state_pages,
        )
        runner.warm_up()
        check.compare(runner, checkpoint.name)
        if (before := memory_of(model.device) if may_replay else None) is None:
            return runner, 0
        choose_graphs(runner, partial(CudaCapture, model.device))
        after = memory_of(model.device)
        return runner, 0 if after is None else max(0, before.num_free - after.num_free)

    def _processor_use(
        self, runner: SpanRunner, checkpoint: Checkpoint, num_threads: int, neighbours: Neighbours
    ) -> ProcessorUse:
        settings, span = self.settings, runner.span
        on_cpu = is_cpu(settings.device)
        num_sampling_threads = 1
        if span.end == checkpoint.num_blocks:
            # While a GPU computes the blocks, all CPU cores are free for sampling. On a CPU, sampling uses as many
            # threads as the blocks use.
            num_sampling_threads = num_threads if on_cpu else settings.threads or available_cores()
        return ProcessorUse(
            # The event loop computes a step only if one thread is enough, since it has no helper threads. On another
            # device it launches recorded steps, since to launch others takes longer than sockets should wait.
            max_inline_s=self._max_inline_s if num_threads == 1 and on_cpu else 0.0,
            launches_inline=bool(self._max_inline_s) and runner.decode_graphs is not None,
            num_sampling_threads=num_sampling_threads,
            max_microbatches=settings.max_microbatches,
            num_devices=neighbours.num_devices,
            compute_thread=self._compute_thread,
            follows_lengths=checkpoint.family.caches_latents,
            # A step of a large model may take that long if a CPU computes it.
            most_looks=0 if on_cpu else _MOST_LOOKS,
            prompt_share=None
            if on_cpu
            else PromptShare(
                settings.max_mixed_step_ms / 1e3, settings.num_batch_tokens, settings.prefill_tokens_during_decode
            ),
        )

    def _load_edges(self, checkpoint: Checkpoint, span: Span) -> Edges | None:
        ends = _ends_of(checkpoint, span)
        if not any(ends.values()):
            return None
        settings = self.settings
        edges = load_edges(
            checkpoint, dtype=DTYPES[settings.dtype], device=settings.device, quantization=settings.quantization, **ends
        )
        if ends["has_head"]:
            edges.choose_products(settings.products)
        return edges

    def _draft_blocks(self, block_bytes: int) -> float:
        """How many blocks of the model have as many bytes as the draft model, and so take as long for a token."""
        settings = self.settings
        if settings.draft_model is None:
            return 0.0
        drafting = Checkpoint.from_pretrained(settings.draft_model, hub=self._hub)
        return num_weights(drafting) * DTYPES[settings.dtype].itemsize / block_bytes

    def _draft_checkpoint(self, checkpoint: Checkpoint, span: Span) -> Checkpoint | None:
        if self.settings.draft_model is None or span.end != checkpoint.num_blocks:
            return None
        return Checkpoint.from_pretrained(self.settings.draft_model, hub=self._hub)

    def _load_shared(self, checkpoint: Checkpoint, span: Span) -> SharedBySamplers:
        if span.end != checkpoint.num_blocks:
            return SharedBySamplers()
        settings, draft_model = self.settings, None
        if (drafting := self._draft_checkpoint(checkpoint, span)) is not None:
            draft_model = DraftModel.load(drafting, checkpoint, dtype=DTYPES[settings.dtype], device=settings.device)
        return SharedBySamplers(draft_model, Grammars(checkpoint, self._metrics.grammars))

    def _weight_format(self, checkpoint: Checkpoint) -> str:
        """The name of the weights' format that `corolla status` shows."""
        settings = self.settings
        packed, expanded = weight_types(checkpoint, settings.quantization)
        if packed or expanded:
            extra = {"packed": ", ".join(packed), "expanded": ", ".join(expanded), "dtype": settings.dtype}
            log.info("formats of the weights", extra=extra)
        return weight_format(settings.dtype, settings.quantization, packed, expanded)

    def _cache_bytes(self, model: SpanModel, checkpoint: Checkpoint) -> int:
        """The bytes for keys and values, once all weights are loaded."""
        settings = self.settings
        if settings.kv_cache_mib:
            return settings.kv_cache_mib << 20
        if (memory := memory_of(model.device)) is None:
            return _CACHE_BYTES_ON_CPUS
        has_head = model.span.end == checkpoint.num_blocks
        return memory.for_pages(self._step_bytes(checkpoint, has_head=has_head), settings.adapters_mib << 20)

    def _step_bytes(self, checkpoint: Checkpoint, *, has_head: bool) -> int:
        """The bytes that the largest step may take."""
        size = step_size(checkpoint, DTYPES[self.settings.dtype])
        return size.num_bytes(self._max_tokens_per_frame, has_head=has_head)

    def _boundary_activation_bytes(self, runner: SpanRunner) -> int:
        given = self.settings.boundary_activations_mib
        if given is not None:
            return given << 20
        if runner.model.device.type == "cpu":
            return _ACTIVATION_BYTES_ON_CPUS
        pool, model = runner.store.pool, runner.model
        of_all_pages = pool.num_pages * pool.page_tokens * model.hidden_size * model.dtype.itemsize
        return max(_ACTIVATION_BYTES_ON_CPUS, min(of_all_pages, (available_bytes() or 0) // SHARE_OF_ACTIVATIONS))

    def _num_pages(self, layout: CacheLayout, cache_bytes: int) -> int:
        num_pages = layout.num_pages(cache_bytes)
        if num_pages < 1 + layout.num_state_pages:
            states = f" and {NUM_KEPT_STATES} times {layout.state_bytes} bytes of recurrent states"
            given = f"COROLLA_KV_CACHE_MIB={self.settings.kv_cache_mib} is"
            if not self.settings.kv_cache_mib:
                given = f"weights and steps leave {cache_bytes} bytes for keys and values, which is"
            raise StartupError(
                f"{given} less than one page of {layout.page_bytes} bytes{states if layout.state_bytes else ''}; hold "
                "fewer blocks, raise COROLLA_KV_CACHE_MIB, or set COROLLA_MAX_BATCH_TOKENS to less"
            )
        return num_pages

    def _load(self) -> router_pb2.ServerLoad:
        if self._sessions is None or self._engine is None:
            return router_pb2.ServerLoad()
        pool = self._sessions.pool
        return router_pb2.ServerLoad(
            num_sessions=len(self._sessions),
            num_pages=pool.num_pages,
            num_free_pages=self._sessions.num_available_pages,
            max_session_tokens=self._sessions.max_session_tokens,
            num_queued_steps=len(self._scheduler),
            decode_step_seconds=self._engine.decode_step_seconds,
            decode_tokens_per_second=self._engine.decode_speed.tokens_per_second,
            decode_batch_rows=self._engine.decode_batch_rows,
            numerics=str(self._numerics),
            kernels=self._kernels,
        )


def _ends_of(checkpoint: Checkpoint, span: Span) -> dict[str, bool]:
    """Which ends of the model a span has: the embedding before the first block, and the head after the last one."""
    return {"has_embedding": span.start == 0, "has_head": span.end == checkpoint.num_blocks}
