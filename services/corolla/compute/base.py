"""What every way to compute blocks has in common: rows of sessions, and the step that they become.

A `BlockRunner` prepares, launches and finishes steps, whatever way computes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from corolla.cache.store import KVStore, SessionCache
from corolla.compute.attention.base import AttentionBackend, AttentionBatch, PackedRow
from corolla.compute.low_rank import LowRankTable
from corolla.compute.prompts import BlockPrompts
from corolla.kernels.state_rows import StateRows
from corolla.models.adapters.products import AdapterBatch, AdapterStacks, SpanAdapter
from corolla.wire.device_copies import Reading
from corolla.wire.span import Span

Embed = Callable[[Tensor], Tensor]
"""Makes the input of rows of one token each on a device: from their positions, int64 `[rows]`, it returns `[rows, H]`
in any dtype."""


class RowWork(NamedTuple):
    """One session's part of a batch.

    Attributes:
        cache: the session's cache; at most one row of a batch has it.
        position: the position of the first new token. Tokens that the cache holds from there on are dropped first.
        num_tokens: how many new tokens there are, at least 1.
        prompts: the session's trained prompts for exactly the blocks that run; None: it has none.
        adapter: the session's adapter; None: it has none.
        long_factors: whether the session's text uses the long factors of a longrope embedding.
    """

    cache: SessionCache
    position: int
    num_tokens: int
    prompts: BlockPrompts | None = None
    adapter: SpanAdapter | None = None
    long_factors: bool = False

    @property
    def takes_prompts(self) -> bool:
        """Trained prompts are added to some of the new tokens."""
        return self.prompts is not None and self.position < self.prompts.values.shape[1]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What all blocks of a step share. The new tokens of all rows lie one after another.

    Attributes:
        rows: the rows; a recorded step has none.
        position_ids: int64 `[N]` of all new tokens, on the device of hidden states.
        end: a number above all positions.
        batch: the rows, as attention takes them.
        adapters: the rows' adapters, as `Blocks.adapters` returns them.
        states: the slots of the rows' recurrent states, where the store has a table of them; else None.
    """

    rows: Sequence[RowWork]
    position_ids: Tensor
    end: int
    batch: AttentionBatch
    adapters: Any = None
    states: StateRows | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[RowWork],
        store: KVStore,
        backend: AttentionBackend,
        device: torch.device,
        adapters: Any = None,
        num_hidden: int = 0,
    ) -> Self:
        """The step of rows whose pages may be written; one copy brings all numbers to the device.

        Args:
            store: the store of all rows' caches.
            backend: the attention.
            device: the device of hidden states.
            adapters: see `PackedStep`.
            num_hidden: how many of a session's first tokens no row sees; rows begin behind them.

        Raises:
            OutOfPages: the table of states has too few slots.
        """
        positions = [row.position + index for row in rows for index in range(row.num_tokens)]
        ends = [*accumulate((row.num_tokens for row in rows), initial=0)]
        packed = [
            PackedRow(row.cache, row.position - num_hidden, *place, num_hidden)
            for row, place in zip(rows, pairwise(ends), strict=True)
        ]
        numbers: list[tuple[Sequence[int], torch.dtype]] = [(positions, torch.int64)]
        # The family's own code runs rows with adapters, and keeps their states by itself.
        if store.state_table is not None and all(row.adapter is None for row in rows):
            slots = [row.cache.state_slots(row.position, row.num_tokens) for row in rows]
            of_tokens = [number for number, row in enumerate(rows) for _ in range(row.num_tokens)]
            numbers += [([slot[which] for slot in slots], torch.int64) for which in (0, 1)]
            numbers += [(ends, torch.int32), (of_tokens, torch.int32)]
        batch, (position_ids, *states) = backend.batch(store, packed, device, numbers)
        return cls(rows, position_ids, max(positions) + 1, batch, adapters, StateRows(*states) if states else None)


class Blocks(ABC):
    """A way to compute the blocks of a span.

    Args:
        stacks: the stacked copies of adapters.
        device: the device of the blocks.

    Attributes:
        name: see `KernelChoices.blocks`.
        adapter_product: see `KernelChoices.adapters`.
        runs_adapters_apart: whether other code runs rows with adapters: then all rows of a step have one, or none has,
            so that no row's code depends on its neighbours.
    """

    name: str
    adapter_product = "torch"
    runs_adapters_apart = False

    def __init__(self, stacks: AdapterStacks, device: torch.device) -> None:
        self._stacks = stacks
        self._device = device

    def adapters(self, rows: Sequence[RowWork]) -> Any:
        """The rows' adapters in the form that `forward` takes; None if no row has one."""
        if all(row.adapter is None for row in rows):
            return None
        return AdapterBatch([(row.adapter, row.num_tokens) for row in rows], self._stacks, self._device)

    @abstractmethod
    def forward(self, step: PackedStep, hidden: Tensor, layers: Sequence[int]) -> Tensor:
        """Runs some of the layers over the new tokens of all rows.

        Args:
            hidden: `[N, H]`, the input of the first layer, in the model's dtype on its device; it is not changed.
            layers: the layers' indices within the span; neighbours, except in a step without rows.

        Returns:
            The output of the last layer, `[N, H]` in the same dtype, on the same device.
        """


class RecordableBlocks(Blocks):
    """A way to compute blocks whose steps may be recorded: see `decode_graphs`.

    A step without rows reads nothing but weights, the tensors of the step and of the store, and `kept_tables`.

    Attributes:
        low_rank: the adapters, multiplied by kernels; None: steps with adapters are not recorded.
    """

    low_rank: LowRankTable | None = None

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """How many layers there are."""

    @property
    @abstractmethod
    def first_of_kinds(self) -> Sequence[int]:
        """The indices of the first layer of each kind: the layers of a kind launch the same kernels."""

    @property
    @abstractmethod
    def page_part_bytes(self) -> int:
        """The bytes that a single token's result for one page takes in a layer, at most."""

    @property
    @abstractmethod
    def kept_tables(self) -> tuple[Tensor, ...]:
        """The rotary tables that steps read now, and that a longer text replaces.

        Each is `[positions, 2, rotary size]` in the dtype of hidden states or float32, on their device.
        """


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch that a device may not have computed yet; its rows' caches hold no new tokens so far.

    More may be launched that reads its output before `BlockRunner.finish` waits for it.

    Attributes:
        rows: the batch's rows.
        hidden: the output, `[sum of num_tokens, H]` in the model's dtype and on its device.
        reading: what the host reads of the batch, with one copy: the sum of all its numbers, and what users add before
            it begins.
        read_sum: waits until the batch is computed, and returns this sum, `[]` in any dtype on any device.
    """

    rows: Sequence[RowWork]
    hidden: Tensor
    reading: Reading
    read_sum: Callable[[], Tensor]


class BlockRunner(Protocol):
    """Computes the blocks of a span: a `SpanRunner`, or a test's wrapper that makes it fail."""

    def prepare(self, rows: Sequence[RowWork], blocks: Span) -> None:
        """Gives the device what it will need of a step that is expected next, all but its hidden states.

        If another step comes, that costs only time, since nothing counts as held.

        Args:
            rows: rows of one token each, which begin where their caches end.

        Raises:
            OutOfPages: the pool has too few pages.
        """
        ...

    def launch(self, rows: Sequence[RowWork], hidden: Tensor | Embed, blocks: Span) -> LaunchedBatch:
        """Launches `blocks` over the new tokens of all rows, which stores their keys and values.

        No cache counts the new tokens as held before `finish`. Without it, another step writes the same positions
        again.

        Args:
            rows: rows of different sessions; single tokens and chunks may be mixed.
            hidden: the input of the first of `blocks`, `[sum of num_tokens, H]`, any device and dtype, row after row.
                Or a function that makes it on the device, for the step after one that is launched and not yet finished:
                rows of one token each, which begin where the rows of that step end.
            blocks: a run of blocks within the span; a session has the same run for all its life.

        Returns:
            The batch, whose reading has not begun.

        Raises:
            ValueError: rows, tensor and span do not fit each other.
            OutOfPages: the pool has too few pages.
        """
        ...

    def finish(self, launched: LaunchedBatch, kept: Sequence[int], blocks: Span) -> tuple[bool, ...]:
        """Waits for a batch that was launched, whose caches then hold the new tokens of the rows in `kept`.

        Args:
            kept: indices of rows, in order; their caches end where the batch began.

        Returns:
            For each row in `kept`, whether all numbers of its output are finite. If not, its cache gets no new token.
        """
        ...

    def may_be_recorded(self, rows: Sequence[RowWork], blocks: Span) -> bool:
        """Returns True if a recorded step fits these rows, as far as that is known before their pages are prepared."""
        ...

    def warm_up(self) -> None:
        """Computes one token that belongs to no session."""
        ...
