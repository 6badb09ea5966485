"""The low-rank products of adapters by Triton kernels: no token depends on the others, and recorded steps have them.

The kernels find the factors of each adapter by a table on the device, so that a recorded step runs with any adapters.
"""

import functools
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.kernels.kernel_trial import are_same, failure_of, relative_error, try_kernel
from corolla.models.adapters.products import LowRank, Place, SpanAdapter
from corolla.models.fused import PLACES
from corolla.models.invariant import TOLERANCES
from corolla.wire.device_copies import copied_numbers, to_device

log = logging.getLogger(__name__)

NUM_SLOTS: Final = 256
"""The most adapters of a batch that the kernels multiply by."""
RECORDED_RANK: Final = 64
"""The largest rank of adapters in recorded steps."""
NO_SLOT: Final = -1
"""The slot of tokens without an adapter."""
_PLACES: Final = sorted(PLACES)
_NUM_LINEARS: Final = sum(map(len, _PLACES))
_FIRST_LINEARS: Final[Mapping[Place, int]] = {
    place: sum(map(len, _PLACES[:index])) for index, place in enumerate(_PLACES)
}
# What trials have found. They use no weights, so a GPU needs each only once, and a server tries one block first.
_FAILURES: Final[dict[tuple[tuple[int, int], torch.dtype, torch.device], str | None]] = {}
# The numbers of an entry: addresses of both factors, rank, first output, number of outputs.
_ENTRY: Final = 5


class LowRankTable:
    """Where the factors of the adapters lie that ran lately.

    Args:
        num_layers: how many blocks the span has.
        device: the device of the factors.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.entries = torch.zeros(_NUM_LINEARS * num_layers, NUM_SLOTS, _ENTRY, dtype=torch.int64, device=device)
        # An adapter that is unloaded leaves its slot.
        self._slots: weakref.WeakKeyDictionary[SpanAdapter, int] = weakref.WeakKeyDictionary()
        self._ranks = [0] * NUM_SLOTS

    def slots(self, adapters: Sequence[SpanAdapter | None]) -> list[int] | None:
        """The slots of adapters, `NO_SLOT` for None; None where they are too many."""
        distinct = {each for each in adapters if each is not None}
        if len(distinct) > NUM_SLOTS:
            return None
        for adapter in distinct - set(self._slots):
            self._enter(adapter, distinct)
        return [NO_SLOT if each is None else self._slots[each] for each in adapters]

    def most_rank(self, slots: Sequence[int]) -> int:
        """The largest rank of the adapters in these slots."""
        return max((self._ranks[slot] for slot in slots if slot != NO_SLOT), default=1)

    def _enter(self, adapter: SpanAdapter, needed: set[SpanAdapter]) -> None:
        free = set(range(NUM_SLOTS)) - set(self._slots.values())
        if not free:
            other = next(each for each in self._slots if each not in needed)
            free = {self._slots.pop(other)}
        slot = min(free)
        entries = torch.zeros(len(self.entries), _ENTRY, dtype=torch.int64)
        for (layer, place), products in adapter.places.items():
            first = layer * _NUM_LINEARS + _FIRST_LINEARS[place]
            for linear, product in enumerate(products.products, first):
                entries[linear] = torch.tensor(_entry(product))
        self._ranks[slot] = int(entries[:, 2].max())
        # The copy comes after the steps that read what the slot held before.
        self.entries[:, slot] = to_device(entries, self.entries.device, torch.int64)
        self._slots[adapter] = slot


def _entry(product: LowRank) -> list[int]:
    rank, width = product.up.shape
    return [product.down.data_ptr(), product.up.data_ptr(), rank, product.first_column, width]


class LowRankBatch:
    """Adds the adapters' products in one batch, as `AdapterBatch` does.

    Args:
        table: the table.
        tiles: see `add_low_rank`.
        most_rank: no rank of the tiles' slots is above it.
    """

    def __init__(self, table: LowRankTable, tiles: Tensor, most_rank: int) -> None:
        self._table = table
        self._tiles = tiles
        self._most_rank = most_rank

    @staticmethod
    def tiles_of_tokens(slots: Sequence[int]) -> list[list[int]]:
        """The tiles of rows of one token each."""
        return [[index, 1, slot] for index, slot in enumerate(slots)]

    @classmethod
    def for_rows(cls, table: LowRankTable, rows: Sequence[tuple[SpanAdapter | None, int]]) -> "LowRankBatch | None":
        """The batch of rows, each with its adapter, or None, and its number of tokens; None: too many adapters."""
        slots = table.slots([adapter for adapter, _ in rows])
        if slots is None:
            return None
        tiles = cls.tiles_of_rows(slots, [num_tokens for _, num_tokens in rows])
        (copied,) = copied_numbers([(tiles, torch.int32)], table.entries.device)
        return cls(table, copied.view(-1, 3), table.most_rank(slots))

    @staticmethod
    def tiles_of_rows(slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The numbers of all tiles of rows with these slots and numbers of tokens, one tile after another."""
        from corolla.kernels.triton.low_rank_launches import TILE_TOKENS

        tiles: list[int] = []
        first = 0
        for slot, num_tokens in zip(slots, lengths, strict=True):
            if slot != NO_SLOT:
                for start in range(0, num_tokens, TILE_TOKENS):
                    tiles += (first + start, min(TILE_TOKENS, num_tokens - start), slot)
            first += num_tokens
        return tiles

    def add(self, layer: int, place: Place, rows: Tensor, output: Tensor) -> None:
        """Adds the products of the tokens' adapters at a place to `output`, in place; see `AdapterBatch.add`.

        Args:
            layer: the layer's index within the span.
            place: the place.
            rows: `[N, in]`, one row for each token of the batch, in the model's dtype.
            output: `[N, out]` in the same dtype.
        """
        from corolla.kernels.triton.low_rank_launches import add_low_rank

        first = layer * _NUM_LINEARS + _FIRST_LINEARS[place]
        add_low_rank(rows, output, self._tiles, self._table.entries, first, len(place), self._most_rank)


def choose_low_rank_table(
    num_layers: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> LowRankTable | None:
    """The table, if the kernels' results hold on this device; None: the products are torch's.

    Args:
        num_layers: how many blocks the span has.
        shapes: inputs and outputs of its linear layers, neighbours as one. Each is tried, so that no kernel is compiled
            when the first adapter runs.
        dtype: the dtype of the model.
        device: its device.
    """
    for shape in shapes:
        if device.type == "cpu" or (shape, dtype, device) not in _FAILURES:
            trial = functools.partial(_failed_trial, *shape, dtype, device)
            _FAILURES[shape, dtype, device] = failure_of(trial)
    failure = next(filter(None, (_FAILURES[shape, dtype, device] for shape in shapes)), None)
    if failure:
        log.warning("adapters are not multiplied by Triton kernels", extra={"failure": failure})
        return None
    return LowRankTable(num_layers, device)


@torch.inference_mode()
def _failed_trial(width: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Multiplies random rows with two adapters and none. Returns what failed, as a sentence's end, or None."""
    place = next(each for each in _PLACES if len(each) == 2)
    outputs, generator = num_outputs // 2, torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def adapter(rank: int) -> SpanAdapter:
        halves = [LowRank(draw(rank, width) * width**-0.5, draw(rank, outputs), first) for first in (0, outputs)]
        return SpanAdapter({(0, place): halves})

    table, adapters = LowRankTable(1, device), [adapter(8), None, adapter(40)]
    sizes = (19, 2, 1)
    rows, output = draw(sum(sizes), width), draw(sum(sizes), num_outputs)

    def added(parts: Sequence[tuple[SpanAdapter | None, int]], begin: int) -> Tensor:
        found = output[begin : begin + sum(size for _, size in parts)].clone()
        batch = LowRankBatch.for_rows(table, parts)
        if batch is not None:
            batch.add(0, place, rows[begin : begin + len(found)], found)
        return found

    def run(is_whole: bool) -> Iterator[Tensor]:
        if is_whole:
            yield added(list(zip(adapters, sizes, strict=True)), 0)
        else:
            yield from (added([(adapters[0], 1)], begin) for begin in range(sizes[0]))

    expected = output.double()
    for each, part in ((adapters[0], slice(0, 19)), (adapters[2], slice(21, 22))):
        products = each.places[0, place].products if each is not None else ()
        changes = [rows[part].double() @ one.down.double().T @ one.up.double() for one in products]
        expected[part] += torch.cat(changes, dim=1)

    def error_of(whole: Tensor) -> float:
        # Tokens without an adapter keep their bits.
        return relative_error(whole, expected) if are_same(whole[19:21], output[19:21]) else math.inf

    return try_kernel(run, (True, False), error_of, TOLERANCES[dtype]).failure
