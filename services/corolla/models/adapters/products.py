"""Adds the low-rank products of adapters (LoRA, Hu et al. 2021) to the outputs of linear layers, for mixed batches.

A place is one or several linear layers that read the same input: their products are computed together. Batches without
an adapter do not call this module. Factors, rows and outputs are on one device and in one dtype, those of the model.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

Place = tuple[str, ...]
"""A place, as the paths of its linear layers within the block, in the order of their outputs."""

PlaceKey = tuple[int, Place]
"""The index of a layer within the span, and a place in it."""

_MAX_GROUPED_TOKENS: Final = 64
"""The most tokens of a batch whose adapters are multiplied together; a longer batch multiplies by one at a time."""
_MAX_SPARE: Final = 2
"""The most padding: a grouped product has at most so many times the adapters, and the tokens, of its batch."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank product that is added to one linear layer; both factors have the model's dtype and device.

    Attributes:
        down: `[rank, in]`.
        up: `[rank, out]`, already multiplied by the adapter's strength.
        first_column: the index of the layer's first output among the outputs of its place.
    """

    down: Tensor
    up: Tensor
    first_column: int


class PlaceProducts:
    """The products of one or several adapters at one place, all padded with zeros to the largest rank.

    Args:
        of_adapters: for each adapter, its products at the place; empty where an adapter has none there.
    """

    def __init__(self, of_adapters: Sequence[Sequence[LowRank]]) -> None:
        # Each layer's second factors, `[adapters, rank, out]`, and first column.
        self._ups: list[tuple[Tensor, int]] = []
        downs: list[Tensor] = []
        for column in sorted({product.first_column for products in of_adapters for product in products}):
            chosen = [
                next((each for each in products if each.first_column == column), None) for products in of_adapters
            ]
            rank = max(len(each.down) for each in chosen if each is not None)
            downs.append(_side_by_side([None if each is None else each.down for each in chosen], rank))
            self._ups.append((_side_by_side([None if each is None else each.up for each in chosen], rank), column))
        self._down = downs[0] if len(downs) == 1 else torch.cat(downs, dim=1)

    @property
    def nbytes(self) -> int:
        return self._down.nbytes + sum(up.nbytes for up, _ in self._ups)

    @property
    def products(self) -> tuple[LowRank, ...]:
        """The products, as views; only for the products of a single adapter."""
        downs = torch.split(self._down[0], [up.shape[1] for up, _ in self._ups])
        return tuple(LowRank(down, up[0], column) for down, (up, column) in zip(downs, self._ups, strict=True))

    @property
    def down(self) -> Tensor:
        """The first factors of all products of a single adapter, concatenated: `[sum of ranks, in]`."""
        return self._down[0]

    def add(self, rows: Tensor, output: Tensor, groups: "_Groups | None" = None) -> None:
        """Adds the products to `output`, in place.

        Args:
            rows: `[N, in]`, the input of the place's layers, in the model's dtype.
            output: `[N, out]`, the output of these layers, in the same dtype.
            groups: which rows have which adapter; None: there is one adapter, and all rows have it.
        """
        num_adapters, _, num_in = self._down.shape
        if groups is not None and groups.index is not None:
            rows = rows.index_select(0, groups.index)
        inner = torch.bmm(rows.reshape(num_adapters, -1, num_in), self._down.transpose(1, 2))
        if groups is not None and groups.filled is not None:
            inner.masked_fill_(groups.filled, 0.0)
        start = 0
        for up, first_column in self._ups:
            rank, width = up.shape[1:]
            part = output.narrow(1, first_column, width)
            change = torch.bmm(inner.narrow(2, start, rank), up).view(-1, width)
            if groups is not None and groups.index is not None:
                part.index_add_(0, groups.index, change)
            else:
                part.add_(change)
            start += rank


def _side_by_side(parts: Sequence[Tensor | None], rank: int) -> Tensor:
    """Stacks factors to `[adapters, rank, ...]`, padded with zeros; a missing factor is all zeros."""
    some = next(part for part in parts if part is not None)
    if len(parts) == 1:
        return some.unsqueeze(0)
    return torch.stack(
        [
            some.new_zeros(rank, some.shape[1]) if part is None else functional.pad(part, (0, 0, 0, rank - len(part)))
            for part in parts
        ]
    )


class SpanAdapter:
    """An adapter's products for a span.

    Args:
        places: the products, by layer and place.
    """

    def __init__(self, places: Mapping[PlaceKey, Sequence[LowRank]]) -> None:
        self.places = {key: PlaceProducts([products]) for key, products in places.items()}
        self.nbytes = sum(place.nbytes for place in self.places.values())


class _Stack:
    """The products of some adapters at each place, stacked in the order of the adapters."""

    def __init__(self, adapters: Sequence[SpanAdapter]) -> None:
        self.adapters = tuple(adapters)
        if len(adapters) == 1:
            self.places: Mapping[PlaceKey, PlaceProducts] = adapters[0].places
            self.nbytes = 0
            return
        keys = {key for adapter in adapters for key in adapter.places}
        self.places = {
            key: PlaceProducts([adapter.places[key].products if key in adapter.places else () for adapter in adapters])
            for key in keys
        }
        self.nbytes = sum(place.nbytes for place in self.places.values())


class AdapterStacks:
    """Keeps stacks of adapters that ran together lately. Only one thread at a time may use this object.

    Args:
        max_bytes: the most memory of all stacks; the newest stack is kept even if it is larger.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        # The least recently used stack comes first.
        self._stacks: OrderedDict[frozenset[SpanAdapter], _Stack] = OrderedDict()

    def stack_of(self, adapters: Sequence[SpanAdapter]) -> _Stack:
        """A stack with these adapters, and perhaps a few others if it was made before."""
        wanted = frozenset(adapters)
        if len(wanted) == 1:
            return _Stack(adapters)
        held = [each for each in self._stacks if wanted <= each and len(each) <= _MAX_SPARE * len(wanted)]
        if held:
            self._stacks.move_to_end(held[-1])
            return self._stacks[held[-1]]
        stack = self._stacks[wanted] = _Stack(adapters)
        while len(self._stacks) > 1 and sum(each.nbytes for each in self._stacks.values()) > self._max_bytes:
            self._stacks.popitem(last=False)
        return stack

    def forget(self, adapter: SpanAdapter) -> None:
        """Drops all stacks with this adapter, so that unloading the adapter frees its memory."""
        for held in [held for held in self._stacks if adapter in held]:
            del self._stacks[held]


@dataclass(frozen=True, slots=True)
class _Groups:
    """The tokens of a batch, grouped by the adapter of a stack that they have; padding makes the groups equally long.

    Attributes:
        index: int64 `[adapters * tokens]`, the tokens' numbers in the batch; None: all tokens in their order.
        filled: bool `[adapters, tokens, 1]`, true where an entry of the index is padding; None: there is no padding.
    """

    index: Tensor | None
    filled: Tensor | None

    @classmethod
    def from_tokens(cls, tokens: Sequence[Sequence[int]], num_tokens: int, device: torch.device) -> "_Groups":
        """Groups the tokens of a batch by adapter.

        Args:
            tokens: for each adapter, the numbers of its tokens.
        """
        size = max(map(len, tokens))
        index = [token for own in tokens for token in (*own, *[0] * (size - len(own)))]
        filled = None
        if any(len(own) < size for own in tokens):
            filled = torch.tensor([[[at >= len(own)] for at in range(size)] for own in tokens], device=device)
        # This holds only without padding: with it, the index may equal the tokens in their order by chance.
        elif index == list(range(num_tokens)):
            return cls(None, None)
        return cls(torch.tensor(index, device=device), filled)


class AdapterBatch:
    """Adds the adapters' products in one batch, whose rows may have different adapters.

    Args:
        rows: for each row, its adapter, or None, and its number of tokens; one row at least has an adapter.

    Attributes:
        num_tokens: the number of tokens of all rows.
    """

    def __init__(
        self, rows: Sequence[tuple[SpanAdapter | None, int]], stacks: AdapterStacks, device: torch.device
    ) -> None:
        tokens: dict[SpanAdapter, list[int]] = {}
        end = 0
        for adapter, num_tokens in rows:
            start, end = end, end + num_tokens
            if adapter is not None:
                tokens.setdefault(adapter, []).extend(range(start, end))
        self.num_tokens = end
        self._parts: list[tuple[SpanAdapter, slice | Tensor]] = []
        self._stack: _Stack | None = None
        num_multiplied = len(tokens) * max(map(len, tokens.values()))
        if end <= _MAX_GROUPED_TOKENS and num_multiplied <= _MAX_SPARE * end:
            self._stack = stacks.stack_of([*tokens])
            self._groups = _Groups.from_tokens([tokens.get(each, ()) for each in self._stack.adapters], end, device)
        else:
            self._parts = [(each, _part_of(own, device)) for each, own in tokens.items()]

    def add(self, layer: int, place: Place, rows: Tensor, output: Tensor) -> None:
        """Adds the products of the rows' adapters at a place to `output`, in place.

        Args:
            layer: the layer's index within the span.
            rows: `[N, in]`, one row for each token of the batch, in the model's dtype.
            output: `[N, out]` in the same dtype.
        """
        if self._stack is not None:
            products = self._stack.places.get((layer, place))
            if products is not None:
                products.add(rows, output, self._groups)
            return
        for adapter, part in self._parts:
            products = adapter.places.get((layer, place))
            if products is None:
                continue
            # A slice gives a view of the output, an index a copy, which is copied back below.
            own = output[part]
            products.add(rows[part], own)
            if isinstance(part, Tensor):
                output.index_copy_(0, part, own)


def _part_of(tokens: Sequence[int], device: torch.device) -> slice | Tensor:
    """The index of some tokens of a batch: a slice, which needs no copy, if the tokens are contiguous."""
    first, last = tokens[0], tokens[-1]
    return slice(first, last + 1) if last - first < len(tokens) else torch.tensor(tokens, device=device)
