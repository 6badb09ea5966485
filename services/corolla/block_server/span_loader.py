"""Loads what a block server holds, and reckons how many bytes of its device that takes."""

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from corolla.block_server.grammars import Grammars
from corolla.block_server.model_files import ModelFiles
from corolla.block_server.row_sampling import SharedBySamplers
from corolla.block_server.settings import MTP, BlockServerSettings
from corolla.cache.layout import NUM_KEPT_STATES, CacheLayout, LayerGroups
from corolla.chassis.errors import StartupError
from corolla.chassis.host_memory import available_bytes
from corolla.chassis.metrics import GrammarMetrics
from corolla.chassis.processors import is_cpu
from corolla.chassis.weight_formats import weight_format
from corolla.compute.agreement import LayerCheck, check_small_copy
from corolla.compute.device import memory_of
from corolla.compute.device_memory import SHARE_OF_ACTIVATIONS, DeviceMemory
from corolla.compute.graph_choice import choose_graphs
from corolla.compute.sizes import state_sizes, step_size
from corolla.compute.span_runner import SpanRunner
from corolla.compute.speed import Speed, measure_speed
from corolla.decoding.draft_model import DraftModel, num_weights
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import CudaCapture
from corolla.models.edges import Edges, load_edges
from corolla.models.families import pageless_layers
from corolla.models.hub import Hub
from corolla.models.mtp import MtpParts, check_has_mtp, load_mtp_parts, mtp_bytes
from corolla.models.read_ahead import ReadAhead, tensors_of
from corolla.models.span_model import SpanModel, load_span, weight_types
from corolla.v1 import router_pb2
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES

log = logging.getLogger(__name__)

_MAX_TAKEN_BACK: Final = 128
"""How many of its newest tokens a session can always take back: layers with a sliding window keep at least this many
tokens more than the window needs. A ring runs 32 tokens ahead of its reader; its last step may have 64 draft tokens."""

_CACHE_BYTES_ON_CPUS: Final = 1 << 30
_ACTIVATION_BYTES_ON_CPUS: Final = 256 << 20

FEWER_WEIGHTS: Final = (
    "hold fewer blocks (COROLLA_BLOCKS, COROLLA_CAPACITY_BLOCKS or COROLLA_WEIGHTS_MIB), or store weights in fewer "
    "bytes (COROLLA_DTYPE=bfloat16, or COROLLA_QUANTIZATION)"
)
FEWER_PAGES: Final = "set COROLLA_KV_CACHE_MIB or COROLLA_MAX_BATCH_TOKENS to less, or hold fewer blocks"


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The weights of a span.

    Attributes:
        edges: the ends of the model, as far as the span reaches them; None: it reaches none.
        check: compares what a runner computes with the family's own code.
        mtp: what the multi-token prediction block has around its layer, which is in the model; None: nothing drafts so.
    """

    model: SpanModel
    edges: Edges | None
    check: LayerCheck
    mtp: MtpParts | None = None

    @property
    def num_bytes(self) -> int:
        return self.model.nbytes + sum(0 if each is None else each.nbytes for each in (self.edges, self.mtp))


class SpanLoader:
    """Reads the checkpoint that the settings name. What it makes belongs to the caller.

    Args:
        max_step_tokens: the most tokens of one step.

    Attributes:
        model_files: finds the model's files on other machines; None: this server has them, or the hub.
    """

    def __init__(self, settings: BlockServerSettings, hub: Hub, max_step_tokens: int, metrics: GrammarMetrics) -> None:
        self.model_files: ModelFiles | None = None
        self._settings = settings
        self._hub = hub
        self._max_step_tokens = max_step_tokens
        self._metrics = metrics
        self._read_ahead: ReadAhead | None = None
        self._has_mtp = settings.draft_model == MTP
        self._new_runner = partial(
            SpanRunner,
            page_tokens=settings.num_page_tokens,
            attention=settings.attention,
            is_fused=settings.fused_blocks,
            products=settings.products,
            kv_cache_dtype=settings.kv_cache_dtype,
        )

    def find_checkpoint(self) -> tuple[Checkpoint, str]:
        """The model's checkpoint and its fingerprint."""
        settings = self._settings
        shared = self.model_files.find() if self.model_files is not None else None
        model = settings.model if shared is None else str(shared.path)
        checkpoint = Checkpoint.from_pretrained(model, revision=settings.revision, hub=self._hub, shared=shared)
        if self.model_files is not None:
            self.model_files.note(checkpoint)
        if self._has_mtp:
            check_has_mtp(checkpoint)
        check_small_copy(checkpoint, settings.num_page_tokens, is_fused=settings.fused_blocks)
        return checkpoint, checkpoint.fingerprint(settings.dtype, settings.quantization, settings.kv_cache_dtype)

    def read_ahead(self, checkpoint: Checkpoint, span: Span) -> None:
        """Begins to read a span's files, so that they lie in memory once they are loaded."""
        if checkpoint.gguf is None:
            self._read_ahead = ReadAhead(checkpoint.weight_index, self.tensors_of(checkpoint, span), available_bytes())

    def tensors_of(self, checkpoint: Checkpoint, span: Span) -> list[str]:
        """The stored names of all tensors that a server of this span loads."""
        return tensors_of(checkpoint, span, has_mtp=self._has_mtp)

    def fetch(self, checkpoint: Checkpoint, span: Span) -> None:
        """Fetches the files of a span. Raises StartupError if they cannot be fetched."""
        checkpoint.fetch(self.tensors_of(checkpoint, span))
        if (drafting := self._draft_checkpoint(checkpoint, span)) is not None:
            drafting.fetch()

    def measure(self, checkpoint: Checkpoint) -> Speed:
        """Measures one block of the model on this machine."""
        settings = self._settings
        return measure_speed(
            checkpoint, DTYPES[settings.dtype], settings.device, settings.quantization,
            settings.kv_cache_dtype, settings.threads, self._new_runner,
        )  # fmt: skip

    def weight_bytes(self, memory: DeviceMemory | None, checkpoint: Checkpoint) -> int:
        """The most bytes that weights may take; 0: no bound. `memory` is that of the device before it has weights."""
        settings = self._settings
        if settings.weights_mib or memory is None or settings.span is not None:
            return settings.weights_mib << 20
        num_bytes = memory.for_weights(
            (settings.kv_cache_mib << 20) or None,
            self.step_bytes(checkpoint, has_head=True),
            settings.adapters_mib << 20,
        )
        if not num_bytes:
            raise StartupError(
                f"COROLLA_DEVICE={settings.device} has {memory.num_free >> 20} MiB free, which leaves nothing for "
                "weights; end other processes there, or set COROLLA_KV_CACHE_MIB, COROLLA_ADAPTERS_MIB or "
                "COROLLA_MAX_BATCH_TOKENS to less"
            )
        return num_bytes

    def load_weights(self, checkpoint: Checkpoint, span: Span) -> Weights:
        settings = self._settings
        if self._read_ahead is not None:
            self._read_ahead.stop()
        has_mtp = self._has_mtp and span.end == checkpoint.num_blocks
        model = load_span(
            checkpoint, span, dtype=DTYPES[settings.dtype], device=settings.device,
            quantization=settings.quantization, has_mtp_layer=has_mtp,
        )  # fmt: skip
        check, edges = LayerCheck(model, settings.num_page_tokens), self._load_edges(checkpoint, span)
        mtp = self._load_mtp(checkpoint, model, edges) if has_mtp and edges is not None else None
        return Weights(model, edges, check, mtp)

    def spare_bytes(self, server: router_pb2.ServerDescription, speed: Speed, span: Span) -> int | None:
        """Returns the bytes of a span's weights without reading them; None: the server may not hold the span."""
        num_edges = (span.start == 0) + (span.end == server.num_model_blocks)
        num_blocks = len(span) + num_edges * server.head_blocks
        if span.end == server.num_model_blocks:
            num_blocks += server.draft_blocks
        if len(span) > server.capacity_blocks or num_blocks > (server.weight_blocks or math.inf):
            return None
        return round(num_blocks * speed.block_bytes)

    def load_spare(self, checkpoint: Checkpoint, span: Span) -> Weights | None:
        """Reads a span that this server does not hold, and lays it out, while others are computed.

        Returns:
            Its weights; None: its files are in the system's cache. transformers changes the type of new tensors of the
            whole process while it builds a model that is not in float32, and a GPU has no room for more weights.
        """
        settings = self._settings
        self.fetch(checkpoint, span)
        if not is_cpu(settings.device) or settings.dtype != "float32":
            if checkpoint.gguf is None:
                ReadAhead(checkpoint.weight_index, self.tensors_of(checkpoint, span), available_bytes()).wait()
            return None
        weights = self.load_weights(checkpoint, span)
        if settings.fused_blocks:
            weights.model.make_fused(settings.products)
        return weights

    def make_runner(
        self,
        weights: Weights,
        checkpoint: Checkpoint,
        cache_bytes_per_token: int,
        draft_model: DraftModel | MtpParts | None,
    ) -> tuple[SpanRunner, int]:
        """The runner, and the bytes of the device that its recorded steps took."""
        settings, model = self._settings, weights.model
        layout = CacheLayout(
            LayerGroups.from_windows(model.windows, pageless_layers(model.config)),
            settings.num_page_tokens,
            cache_bytes_per_token,
            max(self._max_step_tokens, _MAX_TAKEN_BACK),
            sum(state_sizes(checkpoint, model.dtype)[model.span.start : model.span.end]),
            settings.prefix_cache,
        )
        cache_bytes = self._cache_bytes(model, checkpoint)
        if isinstance(draft_model, DraftModel):
            # The draft model has room for as many tokens as the pages, within the same memory.
            token_bytes = layout.page_bytes // layout.page_tokens
            cache_bytes = cache_bytes * token_bytes // (token_bytes + draft_model.token_bytes())
        num_pages = self._num_pages(layout, cache_bytes)
        if isinstance(draft_model, DraftModel):
            draft_model.room.max_tokens = num_pages * settings.num_page_tokens
        may_replay = settings.cuda_graphs == "auto" and model.device.type == "cuda"
        runner = self._new_runner(
            model,
            num_pages=num_pages,
            max_step_tokens=layout.max_step_tokens,
            has_scratch_page=may_replay,
            max_stack_bytes=settings.adapters_mib << 20,
            num_state_pages=layout.num_state_pages,
            num_snapshots=layout.num_snapshots(cache_bytes),
        )
        runner.warm_up()
        if model.mtp_layer is not None:
            runner.warm_up_mtp()
        weights.check.compare(runner, checkpoint.name)
        if settings.prefix_cache:
            runner.store.keep_evicted(settings.host_cache_mib << 20)
        if (before := memory_of(model.device) if may_replay else None) is None:
            return runner, 0
        choose_graphs(runner, partial(CudaCapture, model.device))
        after = memory_of(model.device)
        return runner, 0 if after is None else max(0, before.num_free - after.num_free)

    def step_bytes(self, checkpoint: Checkpoint, *, has_head: bool) -> int:
        """The bytes that the largest step may take."""
        size = step_size(checkpoint, DTYPES[self._settings.dtype])
        return size.num_bytes(self._max_step_tokens, has_head=has_head)

    def boundary_activation_bytes(self, runner: SpanRunner) -> int:
        given = self._settings.boundary_activations_mib
        if given is not None:
            return given << 20
        if runner.model.device.type == "cpu":
            return _ACTIVATION_BYTES_ON_CPUS
        pool, model = runner.store.pool, runner.model
        of_all_pages = pool.num_pages * pool.page_tokens * model.hidden_size * model.dtype.itemsize
        return max(_ACTIVATION_BYTES_ON_CPUS, min(of_all_pages, (available_bytes() or 0) // SHARE_OF_ACTIVATIONS))

    def draft_blocks(self, checkpoint: Checkpoint, block_bytes: int) -> float:
        """How many blocks of the model have as many bytes as what drafts, and so take as long for a token."""
        settings = self._settings
        if settings.draft_model is None:
            return 0.0
        if self._has_mtp:
            return mtp_bytes(checkpoint, DTYPES[settings.dtype], block_bytes) / block_bytes
        drafting = Checkpoint.from_pretrained(settings.draft_model, hub=self._hub)
        return num_weights(drafting) * DTYPES[settings.dtype].itemsize / block_bytes

    def weight_format(self, checkpoint: Checkpoint) -> str:
        """The name of the weights' format that `corolla status` shows."""
        settings = self._settings
        packed, expanded = weight_types(checkpoint, settings.quantization)
        if packed or expanded:
            extra = {"packed": ", ".join(packed), "expanded": ", ".join(expanded), "dtype": settings.dtype}
            log.info("formats of the weights", extra=extra)
        return weight_format(settings.dtype, settings.quantization, packed, expanded)

    def _load_edges(self, checkpoint: Checkpoint, span: Span) -> Edges | None:
        has_embedding, has_head = span.start == 0, span.end == checkpoint.num_blocks
        if not (has_embedding or has_head):
            return None
        settings = self._settings
        edges = load_edges(
            checkpoint, dtype=DTYPES[settings.dtype], device=settings.device, has_embedding=has_embedding,
            has_head=has_head, quantization=settings.quantization,
        )  # fmt: skip
        if has_head:
            edges.choose_products(settings.products)
        return edges

    def _load_mtp(self, checkpoint: Checkpoint, model: SpanModel, edges: Edges) -> MtpParts:
        settings, dtype = self._settings, DTYPES[self._settings.dtype]
        embedding = edges
        if not edges.has_embedding:
            embedding = load_edges(
                checkpoint, dtype=dtype, device=settings.device, has_head=False, quantization=settings.quantization
            )
        return load_mtp_parts(
            checkpoint, model.layers[-1], embedding, edges,
            dtype=dtype, device=settings.device, products=settings.products,
        )  # fmt: skip

    def load_shared(self, checkpoint: Checkpoint, span: Span, mtp: MtpParts | None) -> SharedBySamplers:
        if span.end != checkpoint.num_blocks:
            return SharedBySamplers()
        settings = self._settings
        draft_model: DraftModel | MtpParts | None = mtp
        if (drafting := self._draft_checkpoint(checkpoint, span)) is not None:
            draft_model = DraftModel.load(drafting, checkpoint, dtype=DTYPES[settings.dtype], device=settings.device)
        return SharedBySamplers(draft_model, Grammars(checkpoint, self._metrics))

    def _draft_checkpoint(self, checkpoint: Checkpoint, span: Span) -> Checkpoint | None:
        if self._settings.draft_model is None or self._has_mtp or span.end != checkpoint.num_blocks:
            return None
        return Checkpoint.from_pretrained(self._settings.draft_model, hub=self._hub)

    def _cache_bytes(self, model: SpanModel, checkpoint: Checkpoint) -> int:
        """The bytes for keys and values, once all weights are loaded."""
        settings = self._settings
        if settings.kv_cache_mib:
            return settings.kv_cache_mib << 20
        if (memory := memory_of(model.device)) is None:
            return _CACHE_BYTES_ON_CPUS
        has_head = model.span.end == checkpoint.num_blocks
        return memory.for_pages(self.step_bytes(checkpoint, has_head=has_head), settings.adapters_mib << 20)

    def _num_pages(self, layout: CacheLayout, cache_bytes: int) -> int:
        num_pages = layout.num_pages(cache_bytes)
        if num_pages < 1 + layout.num_state_pages:
            states = f" and {NUM_KEPT_STATES} times {layout.state_bytes} bytes of recurrent states"
            given = f"COROLLA_KV_CACHE_MIB={self._settings.kv_cache_mib} is"
            if not self._settings.kv_cache_mib:
                given = f"weights and steps leave {cache_bytes} bytes for keys and values, which is"
            raise StartupError(
                f"{given} less than one page of {layout.page_bytes} bytes{states if layout.state_bytes else ''}; hold "
                "fewer blocks, raise COROLLA_KV_CACHE_MIB, or set COROLLA_MAX_BATCH_TOKENS to less"
            )
        return num_pages
