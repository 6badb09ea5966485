"""Two runners of one span, over pages read through tables: one launches each operator, the other replays recordings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corolla.cache.store import SessionCache
from corolla.compute import graph_choice
from corolla.compute.attention import backends
from corolla.compute.base import PackedStep, RowWork
from corolla.compute.decode_graphs import DecodeGraphs
from corolla.compute.fused_blocks import FusedBlocks
from corolla.compute.span_runner import SpanRunner
from corolla.compute.triton_blocks import TritonBlocks
from corolla.models.checkpoint import Checkpoint
from corolla.models.cuda_capture import Record
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from tests.checkpoints import make_tiny_checkpoint
from tests.paged_attention import PagedDefinition
from tests.recorded_steps import record
from tests.state_definition import DefinedKernels

SPAN, PAGE_TOKENS, SIZES = Span(1, 4), 8, (1, 2, 4, 8)
# Few, so that pages fall out of windows soon.
MAX_STEP_TOKENS = 2 * PAGE_TOKENS


class Modules(TritonBlocks):
    """Fused modules in the place of the kernels that only GPUs have."""

    def __init__(self, modules: FusedBlocks) -> None:
        self.span, self.low_rank, self._modules = modules.span, None, modules

    def adapters(self, rows: Sequence[RowWork]) -> Any:
        return self._modules.adapters(rows)

    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        return self._modules.forward(step, hidden, layers)


def use_modules(runner: SpanRunner) -> None:
    """Lets the steps of a runner of fused modules, or of blocks with states or latents, be recorded."""
    past = runner.model.family.past
    if isinstance(runner.blocks, FusedBlocks):
        runner.blocks = Modules(runner.blocks)
    elif past.packs_states or past.caches_latents:
        if runner.store.recurrent:
            runner.store.use_state_table()
        runner.blocks = DefinedKernels(runner.model, runner.stacks, runner.blocks)


def are_near(found: Tensor, expected: Tensor) -> bool:
    """The operators of a CPU round by the size of a step, where the kernels of a GPU do not."""
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def make_runner(folder: Path, span: Span = SPAN, **options: Any) -> SpanRunner:
    """Makes a runner with the definition of attention in the place of the kernel that only GPUs have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "paged", PagedDefinition)
        runner = SpanRunner(
            load_span(Checkpoint.from_pretrained(str(folder)), span, dtype=torch.float32),
            **{
                "num_pages": 400, "page_tokens": PAGE_TOKENS, "max_step_tokens": MAX_STEP_TOKENS, "attention": "paged",
                "products": "library", "has_scratch_page": True, **options,
            },
        )  # fmt: skip
    runner.warm_up()
    return runner


def choose(runner: SpanRunner, how: Record = record, sizes: Sequence[int] = SIZES) -> DecodeGraphs | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_choice, "SIZES", tuple(sizes))
        patch.setattr(graph_choice, "are_same", are_near)
        use_modules(runner)
        graph_choice.choose_graphs(runner, lambda: how)
    return runner.decode_graphs


@dataclass
class Session:
    """The same session in both runners."""

    plain: SessionCache
    replayed: SessionCache

    @property
    def caches(self) -> tuple[SessionCache, SessionCache]:
        return self.plain, self.replayed

    @property
    def num_tokens(self) -> int:
        assert self.plain.num_tokens == self.replayed.num_tokens
        return self.plain.num_tokens


class Pair:
    """Runs each step in both runners, and compares the outputs."""

    def __init__(self, folder: Path) -> None:
        self.plain, self.replaying = make_runner(folder, has_scratch_page=False), make_runner(folder)
        graphs = choose(self.replaying)
        assert graphs is not None
        self.graphs = graphs
        self._generator = torch.Generator().manual_seed(0)

    @classmethod
    def of(cls, family: str, folder: Path, **config_changes: Any) -> "Pair":
        return cls(make_tiny_checkpoint(family, folder / family, config_changes=config_changes))

    def open(self, max_tokens: int = 64) -> Session:
        session = Session(self.plain.new_cache(), self.replaying.new_cache())
        for cache in session.caches:
            cache.allocate(max_tokens)
        return session

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[Session, int, int]], blocks: Span = SPAN) -> bool:
        """Runs (session, position, new tokens) rows of random hidden states. Whether that was a replay."""
        hidden = torch.randn(sum(row[2] for row in rows), self.plain.model.hidden_size, generator=self._generator)
        num_replays, padding = self.graphs.num_replays, slice(len(rows), None)
        # Memory that was never written may hold anything, and no output may depend on it.
        self.graphs.buffers.hidden[padding] = torch.nan
        self._spoil_scratch_page()
        expected = self.plain.forward([RowWork(row.plain, start, count) for row, start, count in rows], hidden, blocks)
        found = self.replaying.forward(
            [RowWork(row.replayed, start, count) for row, start, count in rows], hidden, blocks
        )
        # Sums over more rows and longer tables round differently.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return self.graphs.num_replays > num_replays

    def decode(self, sessions: Sequence[Session]) -> bool:
        return self.step([(session, session.num_tokens, 1) for session in sessions])

    def assert_same_memory(self, session: Session) -> None:
        """Both hold the same keys and values, and states."""
        for layer in self.plain.store.recurrent:
            states = [cache.states.at(session.num_tokens)[layer] for cache in session.caches if cache.states]
            for expected, found in zip(*(each.tensors for each in states), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for layer in set(range(len(SPAN))) - self.plain.store.pageless:
            table = session.plain.tables[self.plain.store.group_of(layer)]
            held = [cache.gather(layer, session.num_tokens, table.first_token) for cache in session.caches]
            for expected, found in zip(*held, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def _spoil_scratch_page(self) -> None:
        store = self.replaying.store
        assert store.scratch_page is not None
        start = store.scratch_page * PAGE_TOKENS
        for layer in set(range(len(SPAN))) - store.pageless:
            for tensor in store.layer(layer):
                tensor[start : start + PAGE_TOKENS] = torch.nan
        table = store.state_table
        for layer in store.recurrent if table is not None else ():
            assert table is not None
            for tensor in table.tensors_like(layer, store.state_shapes[layer]):
                tensor[table.scratch_slot] = torch.nan
