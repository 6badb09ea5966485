"""Runs rows of different sessions through a span's blocks; all steps of a server are computed here."""

import math
from collections.abc import Collection, Sequence
from itertools import compress

import torch
from torch import Tensor

from corolla.cache.codecs import CODECS
from corolla.cache.store import KVStore, SessionCache
from corolla.chassis.errors import NonFiniteOutput
from corolla.compute.attention.backends import ShapeProbe, choose_backend
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, AttentionShape
from corolla.compute.attention.latents import shapes_of_latents
from corolla.compute.attention.sdpa import SdpaAttention
from corolla.compute.base import Blocks, Embed, LaunchedBatch, PackedStep, RowWork
from corolla.compute.compiled_blocks import choose_compiled_blocks
from corolla.compute.decode_buffers import DecodeStep
from corolla.compute.decode_graphs import DecodeGraphs
from corolla.compute.fused_blocks import FusedBlocks
from corolla.compute.kernel_choices import KernelChoices
from corolla.compute.reference import FamilyBlocks, FamilyRows, tell_factors
from corolla.compute.state_blocks import StateBlocks, fits
from corolla.compute.state_kernels import choose_state_kernels, shapes_of_attention
from corolla.compute.triton_blocks import choose_triton_blocks
from corolla.models.adapters.products import AdapterStacks
from corolla.models.families import key_shapes, pageless_layers, recurrent_layers
from corolla.models.linear import ways_by_shape
from corolla.models.product_rule import AUTO
from corolla.models.span_model import SpanModel
from corolla.wire.device_copies import Reading, copied_numbers, to_device
from corolla.wire.span import Span


class SpanRunner:
    """Runs a span. Not thread-safe: one thread computes at a time.

    If a family's attention goes through transformers' interface, one packed call runs all rows. The rows of other
    families run one by one, through the same caches.

    Args:
        model: the span; its attention function is set.
        num_pages: pages of the KV cache; on a CPU, unused pages take no memory.
        page_tokens: tokens of a page.
        max_step_tokens: the most new tokens of one row.
        attention: see `choose_backend`.
        is_fused: whether to replace the family's own code by faster code with the same results up to rounding.
        products: how a CPU multiplies by weights; see `product_rule.way_of`.
        has_scratch_page: see `KVStore`; recorded decode steps need it.
        max_stack_bytes: the most bytes of stacks, the stacked copies of adapters that ran together.
        kv_cache_dtype: how keys and values are stored: `auto`, as the model computes them, or a key of CODECS.
        num_state_pages, num_snapshots: see `KVStore`.

    Attributes:
        stacks: the stacked copies of adapters.
        blocks: the way to compute the blocks.
        decode_graphs: recorded steps, which are replayed where they fit; `graph_choice` sets them.
    """

    def __init__(
        self,
        model: SpanModel,
        *,
        num_pages: int = 1024,
        page_tokens: int = 32,
        max_step_tokens: int = 512,
        attention: str = "auto",
        is_fused: bool = True,
        products: str = AUTO,
        has_scratch_page: bool = False,
        max_stack_bytes: int = 256 << 20,
        kv_cache_dtype: str = "auto",
        num_state_pages: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        self.model = model
        self.stacks = AdapterStacks(max_stack_bytes)
        self.decode_graphs: DecodeGraphs | None = None
        self.blocks: Blocks
        codec = CODECS[kv_cache_dtype](model.dtype) if kv_cache_dtype != "auto" else None
        if is_fused:
            model.make_fused(products)
        self.store = KVStore(
            num_pages, page_tokens, model.windows_of_attentions, max_step_tokens=max_step_tokens,
            has_scratch_page=has_scratch_page, codec=codec,
            recurrent=recurrent_layers(model.config), pageless=pageless_layers(model.config),
            num_state_pages=num_state_pages, num_snapshots=num_snapshots, key_shapes=key_shapes(model.config),
            mtp_layer=model.mtp_layer,
        )  # fmt: skip
        if model.fused is not None:
            self.blocks = FusedBlocks(model.fused, self.stacks)
        elif is_fused and fits(model):
            self.blocks = StateBlocks(model, self.stacks)
        elif model.packs_rows:
            self.blocks = FamilyBlocks(model, self.stacks, is_exact=not is_fused)
        else:
            self.blocks = FamilyRows(model, self.stacks, is_exact=not is_fused)
        shapes: Collection[AttentionShape] = ()
        if model.family.past.caches_latents and not model.family.past.picks_tokens:
            shapes = shapes_of_latents(model.modules()) if is_fused else ()
        elif not isinstance(self.blocks, FamilyRows):
            shapes = self._probed()
        elif is_fused:
            shapes = shapes_of_attention(model)
        self.backend: AttentionBackend = choose_backend(
            attention, model.device, model.dtype, page_tokens, shapes=shapes, codec=codec
        )
        # Whole blocks attend in ways of their own, which show a token all tokens before it.
        self._mtp_blocks, self._mtp_backend = self.blocks, SdpaAttention()
        if model.fused is not None:
            given = (model.fused, self.store, self.backend, model.dtype)
            self.blocks = (
                choose_compiled_blocks(*given, self.stacks)
                or choose_triton_blocks(*given, self.stacks, takes_adapters=max_stack_bytes > 0)
                or self.blocks
            )
        elif is_fused:
            self.blocks = choose_state_kernels(model, self.store, self.backend, self.stacks, self.blocks) or self.blocks

    @torch.inference_mode()
    def _probed(self) -> Collection[AttentionShape]:
        """Runs the blocks for one token, and returns what their attention is called with."""
        probe = ShapeProbe()
        hidden = torch.zeros(1, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device)
        positions = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        step = PackedStep((), positions, 1, AttentionBatch(self.store, (), probe))
        self.blocks.forward(step, hidden, range(len(self.span)))
        return probe.shapes

    @property
    def span(self) -> Span:
        return self.model.span

    @property
    def kernel_choices(self) -> KernelChoices:
        """The kernels that this runner's blocks run with."""
        expanded = {"x".join(map(str, each.shape)) for each in self.model.packed_layers if each.expanded is not None}
        products = {**ways_by_shape(self.model.linears), **dict.fromkeys(sorted(expanded), "expanded")}
        return KernelChoices(self.backend.name, self.blocks.name, products, self.blocks.adapter_product)

    def new_cache(self) -> SessionCache:
        return self.store.new_cache()

    def warm_up(self) -> None:
        """Computes one token that belongs to no session.

        At the start this allocates the memory for keys and values; after a failure it shows whether the device still
        works.

        Raises:
            OutOfPages: sessions have reserved all pages.
        """
        cache = self.new_cache()
        cache.reserve(1)
        try:
            # Weights that are not finite are found by the sessions, which get an error that says so.
            launched = self.launch([RowWork(cache, 0, 1)], torch.zeros(1, self.model.hidden_size), self.span)
            self.finish(launched, [0], self.span)
        finally:
            cache.clear()

    def warm_up_mtp(self) -> None:
        """Runs the layer of the multi-token prediction block once, which allocates its memory; see `warm_up`."""
        cache = self.new_cache()
        cache.reserve(2)
        try:
            hidden = torch.zeros(1, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device)
            self.predict([RowWork(cache, 1, 1)], hidden)
        finally:
            cache.clear()

    @torch.inference_mode()
    def predict(self, rows: Sequence[RowWork], hidden: Tensor) -> Tensor:
        """Runs the layer of the multi-token prediction block, which stores keys and values in the session's pages.

        The first token of a text has none there, since no output precedes it, and the others do not see it.

        Args:
            rows: rows of different sessions. A row may begin where the session's tokens end: its tokens are draft
                tokens then, within the session's reserved tokens, and the next step writes over them.
            hidden: `[sum of num_tokens, H]`, the layer's inputs, row after row, in the model's dtype on its device.

        Returns:
            The layer's output, `[sum of num_tokens, H]` in the same dtype, on the same device.

        Raises:
            ValueError: a row begins with the first token of a text, or ends beyond the reserved tokens.
            OutOfPages: the pool has too few pages.
        """
        for row in rows:
            cache, end = row.cache, row.position + row.num_tokens
            if row.position < 1 or end > cache.num_reserved_tokens:
                raise ValueError(f"a row of the tokens [{row.position}, {end}) cannot be predicted")
            if end > cache.num_tokens:
                cache.prepare(cache.num_tokens, end - cache.num_tokens)
        step = PackedStep.of(rows, self.store, self._mtp_backend, hidden.device, num_hidden=1)
        self.model.adapters = None
        return self._mtp_blocks.forward(step, hidden, (len(self.span),))

    def forward(self, rows: Sequence[RowWork], hidden: Tensor, blocks: Span) -> Tensor:
        """Launches and finishes a batch, and returns its output; raises if a row is not finite.

        Args:
            hidden: `[sum of num_tokens, H]`, any device and dtype; see `launch` for all arguments.

        Returns:
            `[sum of num_tokens, H]` in the model's dtype, on its device.

        Raises:
            NonFiniteOutput: a row has NaN or Inf. The other rows' tokens are in their caches.
        """
        launched = self.launch(rows, hidden, blocks)
        if not all(self.finish(launched, range(len(rows)), blocks)):
            raise NonFiniteOutput(f"Blocks {blocks} produced a number that is not finite.")
        return launched.hidden

    @torch.inference_mode()
    def launch(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> LaunchedBatch:
        """See `BlockRunner.launch`. `hidden` is `[sum of num_tokens, H]`, any device and dtype."""
        if isinstance(hidden, Tensor):
            self._check(rows, hidden, blocks)
            for row in rows:
                row.cache.truncate(row.position)
        for row in rows:
            row.cache.prepare(row.position, row.num_tokens)
        graphs, step = self.decode_graphs, self._recorded(rows, blocks)
        output = self._computed(rows, hidden, blocks) if graphs is None or step is None else graphs.replay(step, hidden)
        # If a row has NaN or Inf, the sum is not finite. It may also overflow, so then each row is checked by itself.
        reading = Reading()
        return LaunchedBatch(rows, output, reading, reading.add(output.sum(dtype=torch.float32)))

    @torch.inference_mode()
    def finish(self, launched: LaunchedBatch, kept: Sequence[int], blocks: Span) -> tuple[bool, ...]:
        """See `BlockRunner.finish`."""
        rows = [launched.rows[index] for index in kept]
        finite: tuple[bool, ...] = (True,) * len(rows)
        if not math.isfinite(launched.read_sum().item()):
            parts = torch.split(launched.hidden, [row.num_tokens for row in launched.rows])
            finite = tuple(bool(torch.isfinite(parts[index]).all()) for index in kept)
        for row, is_finite in zip(rows, finite, strict=True):
            if is_finite:
                row.cache.commit(row.position + row.num_tokens)
                row.cache.blocks = blocks
        return finite

    @torch.inference_mode()
    def prepare(self, rows: Sequence[RowWork], blocks: Span) -> None:
        """See `BlockRunner.prepare`."""
        if any(row.position >= row.cache.num_reserved_tokens for row in rows):
            return
        for row in rows:
            row.cache.prepare(row.position, row.num_tokens)
        graphs, step = self.decode_graphs, self._recorded(rows, blocks)
        if graphs is not None and step is not None:
            graphs.prepare(step)

    def may_be_recorded(self, rows: Sequence[RowWork], blocks: Span) -> bool:
        """See `BlockRunner.may_be_recorded`."""
        graphs = self.decode_graphs
        if graphs is None or blocks != self.span or len(rows) > graphs.max_rows:
            return False
        # A further step cannot read states that are still computed.
        return all(
            row.num_tokens == 1
            and not row.takes_prompts
            and (row.cache.states is None or row.position in row.cache.states)
            for row in rows
        )

    def _recorded(self, rows: Sequence[RowWork], blocks: Span) -> DecodeStep | None:
        """The recorded step of the rows, whose pages may be written; None if none fits."""
        graphs = self.decode_graphs
        if graphs is None or not self.may_be_recorded(rows, blocks):
            return None
        return graphs.step([(row.cache, row.position) for row in rows], [row.adapter for row in rows])

    def _computed(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> Tensor:
        device, dtype = self.model.device, self.model.dtype
        if not isinstance(hidden, Tensor):
            (positions,) = copied_numbers([([row.position for row in rows], torch.int64)], device)
            hidden = hidden(positions)
        hidden = to_device(hidden, device, dtype)
        have_adapters = [row.adapter is not None for row in rows]
        if not self.blocks.runs_adapters_apart or len({*have_adapters}) == 1:
            return self._together(rows, hidden, blocks)
        lengths = [row.num_tokens for row in rows]
        given = torch.split(hidden, lengths)
        outputs = []
        for which in (have_adapters, [not each for each in have_adapters]):
            part = self._together(list(compress(rows, which)), torch.cat([*compress(given, which)]), blocks)
            outputs.append(iter(torch.split(part, [*compress(lengths, which)])))
        return torch.cat([next(outputs[0 if each else 1]) for each in have_adapters])

    def _together(self, rows: Sequence[RowWork], hidden: Tensor, blocks: Span) -> Tensor:
        step, layers = self._packed_step(rows, hidden.device), self.model.all_blocks.indices(blocks)
        # The hooks of modules read them there.
        self.model.adapters = step.adapters
        if not any(row.takes_prompts for row in rows):
            return self.blocks.forward(step, hidden, layers)
        hidden = hidden.clone()  # the input may be a view of the received bytes
        for index, layer in enumerate(layers):
            start = 0
            for row in rows:
                if row.prompts is not None:
                    part = row.prompts.part(index, row.position, row.num_tokens, hidden.device)
                    hidden[start : start + len(part)] += part.to(hidden)
                start += row.num_tokens
            hidden = self.blocks.forward(step, hidden, (layer,))
        return hidden

    def _packed_step(self, rows: Sequence[RowWork], device: torch.device) -> PackedStep:
        tell_factors(self.model, rows)
        return PackedStep.of(rows, self.store, self.backend, device, self.blocks.adapters(rows))

    def _check(self, rows: Sequence[RowWork], hidden: Tensor, blocks: Span) -> None:
        self.model.all_blocks.indices(blocks)
        num_tokens, caches = 0, set[int]()
        for row in rows:
            cache, position = row.cache, row.position
            if position and cache.blocks != blocks and cache.blocks is not None:
                raise ValueError(f"a session of blocks {cache.blocks} keeps its blocks, and cannot run {blocks}")
            if row.num_tokens < 1 or not 0 <= position <= cache.num_tokens:
                held = cache.num_tokens
                raise ValueError(f"{row.num_tokens} tokens at position {position} do not follow {held} cached ones")
            caches.add(id(cache))
            num_tokens += row.num_tokens
        if not rows or hidden.shape != (num_tokens, self.model.hidden_size):
            raise ValueError(f"rows of {num_tokens} tokens do not fit a tensor of shape {tuple(hidden.shape)}")
        if len(caches) != len(rows):
            raise ValueError("two rows of a batch have the same cache")
