"""The low-rank products of adapters, added to what linear layers give: rows of different adapters in one batch.

A place is one or several linear layers that read the same input: their products are computed together. Where no row of
a batch has an adapter, nothing here is called.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

Place = tuple[str, ...]
"""Paths of its linear layers within the block, in the order of their outputs."""

PlaceKey = tuple[int, Place]
"""A layer's index within the span, and a place of it."""

_MAX_GROUPED_TOKENS: Final = 64
"""Of longer batches each adapter's tokens are multiplied for themselves, wherever they lie."""
_MAX_SPARE: Final = 2
"""So many times the adapters, or the tokens, that a batch has may be multiplied with it: the rest is for nothing."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The product of one linear layer.

    Attributes:
        down: `[rank, in]`.
        up: `[rank, out]`, with the adapter's strength in it.
        first_column: where its output begins in that of its place.
    """

    down: Tensor
    up: Tensor
    first_column: int


class PlaceProducts:
    """The products at one place, of one adapter or of several. Ranks are those of the largest one, filled with zeros.

    Args:
        of_adapters: for each adapter its products at the place; none where it has none there.
    """

    def __init__(self, of_adapters: Sequence[Sequence[LowRank]]) -> None:
        # Of each layer the second factors, `[adapters, rank, out]`, and its first column.
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
        """Where they are those of one adapter: views, which take no memory."""
        downs = torch.split(self._down[0], [up.shape[1] for up, _ in self._ups])
        return tuple(LowRank(down, up[0], column) for down, (up, column) in zip(downs, self._ups, strict=True))

    @property
    def down(self) -> Tensor:
        """Of one adapter the first factors of all its products, one below the other: `[ranks, in]`."""
        return self._down[0]

    def add(self, rows: Tensor, output: Tensor, groups: "_Groups | None" = None) -> None:
        """Adds the products to `output`, in place.

        Args:
            rows: `[N, in]`, what the place's layers have read.
            output: `[N, out]`, what they gave.
            groups: which rows have which adapter; None: there is one adapter, and all have it.
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
    """`[adapters, rank, ...]`; zeros where there is none."""
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
    """What an adapter changes in a span.

    Args:
        places: its products, by layer and place.
    """

    def __init__(self, places: Mapping[PlaceKey, Sequence[LowRank]]) -> None:
        self.places = {key: PlaceProducts([products]) for key, products in places.items()}
        self.nbytes = sum(place.nbytes for place in self.places.values())


class _Stack:
    """Several adapters side by side, in their order."""

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
    """Stacks of the adapters that ran together lately. They are used, and forgotten, by one thread at a time.

    Args:
        max_bytes: of all of them, though never fewer than the one that runs.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        # Least recently used first.
        self._stacks: OrderedDict[frozenset[SpanAdapter], _Stack] = OrderedDict()

    def of(self, adapters: Sequence[SpanAdapter]) -> _Stack:
        """A stack that has them, and few more; a new one has their order."""
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
        """The adapter is unloaded: what holds its weights is given back."""
        for held in [held for held in self._stacks if adapter in held]:
            del self._stacks[held]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which tokens of a batch each adapter of a stack multiplies: as many for each.

    Attributes:
        index: int64 `[adapters * tokens]`; None: all tokens in their order.
        filled: bool `[adapters, tokens, 1]`, where the index names a token for nothing; None: nowhere.
    """

    index: Tensor | None
    filled: Tensor | None

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], num_tokens: int, device: torch.device) -> "_Groups":
        """Args:
        tokens: for each adapter those that have it.
        num_tokens: of the batch.
        """
        size = max(map(len, tokens))
        index = [token for own in tokens for token in (*own, *[0] * (size - len(own)))]
        filled = None
        if any(len(own) < size for own in tokens):
            filled = torch.tensor([[[at >= len(own)] for at in range(size)] for own in tokens], device=device)
        # Where an adapter has no token, the index may name all in their order, and yet not each for its own.
        elif index == list(range(num_tokens)):
            return cls(None, None)
        return cls(torch.tensor(index, device=device), filled)


class AdapterBatch:
    """Which tokens of a batch have which adapter.

    Args:
        rows: for each row its adapter, or None, and the number of its tokens.
        stacks: of this span.
        device: where the batch is computed.

    Attributes:
        num_tokens: of all rows.
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
            self._stack = stacks.of([*tokens])
            self._groups = _Groups.of([tokens.get(each, ()) for each in self._stack.adapters], end, device)
        else:
            self._parts = [(each, _part_of(own, device)) for each, own in tokens.items()]

    def add(self, layer: int, place: Place, rows: Tensor, output: Tensor) -> None:
        """Adds what the rows' adapters change at a place.

        Args:
            layer: index within the span.
            rows: `[N, in]`, one for each token of the batch.
            output: `[N, out]`; is changed.
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
            # Of a slice these are views, and of an index copies.
            own = output[part]
            products.add(rows[part], own)
            if isinstance(part, Tensor):
                output.index_copy_(0, part, own)


def _part_of(tokens: Sequence[int], device: torch.device) -> slice | Tensor:
    """Some tokens of a batch, in their order: where they lie together, none is copied."""
    first, last = tokens[0], tokens[-1]
    return slice(first, last + 1) if last - first < len(tokens) else torch.tensor(tokens, device=device)
