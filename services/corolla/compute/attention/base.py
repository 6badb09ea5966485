"""What every way to attend has in common: rows of different sessions, computed in one call.

All rows' new keys and values are written into the pages of their sessions; then each row attends to the tokens of its
own session, in their pages. Rows never see each other. All tensors of a call are on the device of the pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from corolla.cache.store import KVStore, SessionCache
from corolla.cache.tables import Extent
from corolla.wire.device_copies import copied_numbers

SHORT_ROW: Final = 8
"""A row's new tokens attend one by one if they are at most so many, and as a chunk if they are more."""

NumberLists = Sequence[tuple[Sequence[int], torch.dtype]]
"""Lists of numbers, each with an integer dtype."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row's place in a call: its tokens are `[start, end)` of the call's tokens.

    Attributes:
        cache: the session's cache, prepared for this step.
        position: the position of the first new token in the session.
        num_hidden: how many of the session's first tokens the row does not see; its positions count from there on.
    """

    cache: SessionCache
    position: int
    start: int
    end: int
    num_hidden: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def slots(self, group: int) -> Sequence[int]:
        """The slots of the new tokens in a group of layers."""
        return self.cache.slots(self.num_hidden + self.position, self.num_tokens, group)

    def extents(self, start: int, end: int, group: int) -> tuple[Extent, ...]:
        """The runs that hold the positions `[start, end)` in a group of layers."""
        return self.cache.extents(self.num_hidden + end, self.num_hidden + start, group)

    def gather(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies the keys and values of the positions `[start, end)`; see `SessionCache.gather`."""
        return self.cache.gather(layer, self.num_hidden + end, self.num_hidden + start)


@dataclass(slots=True)
class LayerInput:
    """The inputs of attention in one layer; all tensors have one dtype and device.

    Attributes:
        layer: the layer's index within the server's span.
        query: `[N, heads, head_dim]` of the new tokens of all rows.
        key: `[N, key heads, head_dim]`.
        value: `[N, key heads, value head size]`.
        scaling: the factor of the scores.
        window: how many tokens a token sees, itself included; None: it sees all tokens before it.
        softcap: the bound of the scores; None: they are not bounded.
        sinks: attention sinks, `[heads]` in a dtype of any width; None: there are none.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def part(self, row: PackedRow) -> "LayerInput":
        """The part of the inputs that belongs to one row."""
        query, key, value = (tensor[row.start : row.end] for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a layer asks of attention; the defaults are ordinary sizes.

    Attributes:
        num_heads: how many query heads there are.
        num_key_heads: how many key heads, and value heads, there are.
        key_size: the size of a query head and of a key head.
        value_size: the size of a value head.
        scaling: the factor of the scores.
        window: how many tokens a token sees, itself included; None: it sees all tokens before it.
        softcap: the bound of the scores; None: they are not bounded.
        has_sinks: whether each head has a sink, see `LayerInput`.
        rotated_size: how many of a key's numbers are rotated, in multi-latent attention, where the others are the value
            of the only key head; 0: keys and values lie apart.
    """

    num_heads: int = 4
    num_key_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    scaling: float = 0.125
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    rotated_size: int = 0


class AttentionBackend(ABC):
    """A way to compute attention over pages.

    With a codec, tokens of a chunk see each other's keys and values rounded, as later tokens will see them.
    """

    name: str

    @abstractmethod
    def attend(self, batch: "AttentionBatch", given: LayerInput) -> Tensor:
        """See `AttentionBatch.attend`."""

    def attend_to_latents(
        self, _batch: "AttentionBatch", _layer: int, _query: Tensor, _scaling: float
    ) -> Tensor | None:
        """Attends to latents that are stored already, which all heads share as keys and as values.

        Args:
            _batch: the rows.
            _layer: the layer's index within the span.
            _query: `[N, heads, latent size + rotated size]` in the model's dtype, contiguous.
            _scaling: the factor of the scores.

        Returns:
            The sums of latents, `[N, heads, latent size]` on the same device, in float32 or the query's dtype; None:
            there is no function for them.
        """
        return None

    def batch(
        self, store: KVStore, rows: Sequence[PackedRow], device: torch.device, others: NumberLists = ()
    ) -> tuple["AttentionBatch", list[Tensor]]:
        """Makes the batch of these rows, and brings other numbers to the device, for which nothing waits.

        Args:
            store: the store of all rows' keys and values.
            rows: rows of different sessions.
            device: where the pages are.
            others: the other numbers.

        Returns:
            The batch, and the other numbers, `[length]` of their dtypes.
        """
        return AttentionBatch(store, rows, self), copied_numbers(others, device)


class AttentionBatch:
    """The rows of one call, with the slots, runs and masks that all its layers share.

    A slot is the place of one token in the stored tensors of a layer; a run is several consecutive slots.

    Args:
        store: the store of all rows' keys and values.
        rows: rows of different sessions.
        backend: computes the attention.
        slots: for each group of layers, the slots of the new tokens, int64 `[N]`, if they are known already.
        prepared: for each group of layers, what the backend would prepare, if it is known already. If `slots` and
            `prepared` have all groups, `rows` are not read.
    """

    def __init__(
        self,
        store: KVStore,
        rows: Sequence[PackedRow],
        backend: AttentionBackend,
        *,
        slots: Mapping[int, Tensor] | None = None,
        prepared: Mapping[int, Any] | None = None,
    ) -> None:
        self.store = store
        self.rows = tuple(rows)
        self.backend = backend
        self._slots: dict[int, Tensor] = dict(slots or {})
        self._extents: dict[tuple[int, int, int, int], tuple[tuple[int, int], ...]] = {}
        self._biases: dict[tuple[int, int, int, int], Tensor | None] = {}
        self._parts: dict[tuple[PackedRow, ...], AttentionBatch] = {}
        # The object of each group that a backend prepares once for all layers of the group.
        self.prepared: dict[int, Any] = dict(prepared or {})

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores new keys and values and attends. See `LayerInput`.

        Returns:
            `[N, heads, value head size]` in the query's dtype, on its device.
        """
        return self.backend.attend(self, LayerInput(layer, query, key, value, scaling, window, softcap, sinks))

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens of all rows.

        Args:
            layer: the layer's index within the span.
            key: `[N, key heads, head_dim]` in the model's dtype.
            value: `[N, key heads, value head size]` in the same dtype.

        Returns:
            The layer's keys and values of all sessions as they are stored, see `KVStore.layer`.
        """
        slots = self.slots(layer, key.device)
        keys, values = self.store.layer_like(layer, key, value)
        keys.index_copy_(0, slots, self.store.encoded(key))
        values.index_copy_(0, slots, self.store.encoded(value))
        return keys, values

    def part(self, rows: tuple[PackedRow, ...], device: torch.device) -> "AttentionBatch":
        """The batch of some of the rows, which may have other places there.

        Args:
            rows: the rows, by their places in the part.
            device: where the pages are.
        """
        if rows == self.rows:
            return self
        if rows not in self._parts:
            self._parts[rows], _ = self.backend.batch(self.store, rows, device)
        return self._parts[rows]

    def slots(self, layer: int, device: torch.device) -> Tensor:
        """The slots of the new tokens of all rows in a layer, int64 `[N]`."""
        group = self.store.group_of(layer)
        slots = self._slots.get(group)
        if slots is None:
            slots = self._slots[group] = torch.tensor(slots_of(self.rows, group), device=device)
        return slots

    def extents(self, number: int, layer: int, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The runs that hold the positions `[start, end)` of row `number`, each as first slot and number of tokens."""
        key = (number, self.store.group_of(layer), start, end)
        extents = self._extents.get(key)
        if extents is None:
            extents = self._extents[key] = self.rows[number].extents(start, end, key[1])
        return extents

    def bias(self, position: int, num_queries: int, first_key: int, num_keys: int, like: Tensor) -> Tensor | None:
        """The mask to add to the scores of queries at `position` and after it, over keys at `first_key` and after it.

        Returns:
            `[num_queries, num_keys]` of the dtype and device of `like`, 0 or minus infinity; None where every query
            sees every key.
        """
        kind = (position, num_queries, first_key, num_keys)
        if kind not in self._biases:
            queries = torch.arange(position, position + num_queries, device=like.device)[:, None]
            keys = torch.arange(first_key, first_key + num_keys, device=like.device)[None, :]
            unseen = keys > queries
            bias = torch.zeros(unseen.shape, dtype=like.dtype, device=like.device).masked_fill_(unseen, -torch.inf)
            self._biases[kind] = bias if bool(unseen.any()) else None
        return self._biases[kind]


CALLED: Final = ContextVar[AttentionBatch]("the batch that the family's own code is called for")


def slots_of(rows: Sequence[PackedRow], group: int) -> list[int]:
    """The slots of the new tokens of all rows in a group of layers."""
    return [slot for row in rows for slot in row.slots(group)]
