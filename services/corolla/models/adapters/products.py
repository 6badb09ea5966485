"""The low-rank products of adapters, added to what linear layers give: rows of different adapters in one batch.

A place is one or several linear layers that read the same input: their products are computed together. Where no row of
a batch has an adapter, nothing here is called.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

Place = tuple[str, ...]
"""Paths of its linear layers within the block, in the order of their outputs."""

PlaceKey = tuple[int, Place]
"""A layer's index within the span, and a place of it."""

_MAX_STACKED_TOKENS: Final = 64
"""Of longer batches each adapter's rows are multiplied for themselves: they are few, and long."""
_MAX_SPARE: Final = 2
"""Adapters of a stack that a batch has no row of cost as much as the others."""


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


@dataclass(frozen=True, slots=True)
class _Factor:
    """Of one layer of a place, for all adapters of a stack."""

    ranks: tuple[int, ...]
    up: Tensor
    first_column: int


class PlaceProducts:
    """The products at one place, of one adapter or of several.

    Args:
        of_adapters: for each adapter its products at the place; none where it has none.
    """

    def __init__(self, of_adapters: Sequence[Sequence[LowRank]]) -> None:
        columns = sorted({product.first_column for products in of_adapters for product in products})
        self._factors: list[_Factor] = []
        downs: list[Tensor] = []
        for column in columns:
            # Each layer's products side by side, so that one multiplication serves all adapters.
            chosen = [
                next((each for each in products if each.first_column == column), None) for products in of_adapters
            ]
            downs += [each.down for each in chosen if each is not None]
            ups = [each.up for each in chosen if each is not None]
            ranks = tuple(0 if each is None else len(each.down) for each in chosen)
            self._factors.append(_Factor(ranks, ups[0] if len(ups) == 1 else torch.cat(ups), column))
        self._down = downs[0] if len(downs) == 1 else torch.cat(downs)
        self.ranks = tuple(factor.ranks for factor in self._factors)

    @property
    def nbytes(self) -> int:
        return self._down.nbytes + sum(factor.up.nbytes for factor in self._factors)

    @property
    def products(self) -> tuple[LowRank, ...]:
        """Where they are those of one adapter: views, which take no memory."""
        downs = torch.split(self._down, [factor.ranks[0] for factor in self._factors])
        return tuple(
            LowRank(down, factor.up, factor.first_column) for down, factor in zip(downs, self._factors, strict=True)
        )

    def add(self, rows: Tensor, output: Tensor, others: Tensor | None) -> None:
        """Adds the products to `output`, in place.

        Args:
            rows: `[N, in]`, what the place's layers have read.
            output: `[N, out]`, what they gave.
            others: bool `[N, sum of ranks]`, true for the adapters that a row does not have; None: it has all.
        """
        inner = torch.mm(rows, self._down.t())
        if others is not None:
            inner.masked_fill_(others, 0.0)
        start = 0
        for factor in self._factors:
            rank, width = factor.up.shape
            part = output.narrow(1, factor.first_column, width)
            part.addmm_(inner.narrow(1, start, rank), factor.up)
            start += rank


class SpanAdapter:
    """What an adapter changes in a span.

    Args:
        places: its products, by layer and place.
    """

    def __init__(self, places: Mapping[PlaceKey, Sequence[LowRank]]) -> None:
        self.places = {key: PlaceProducts([products]) for key, products in places.items()}
        self.nbytes = sum(place.nbytes for place in self.places.values())


class _Stack:
    """Several adapters side by side."""

    def __init__(self, adapters: Sequence[SpanAdapter]) -> None:
        self.numbers = {adapter: number for number, adapter in enumerate(adapters)}
        keys = {key for adapter in adapters for key in adapter.places}
        if len(adapters) == 1:
            self.places: Mapping[PlaceKey, PlaceProducts] = adapters[0].places
            self.nbytes = 0
            return
        self.places = {
            key: PlaceProducts([adapter.places[key].products if key in adapter.places else () for adapter in adapters])
            for key in keys
        }
        self.nbytes = sum(place.nbytes for place in self.places.values())


class AdapterStacks:
    """Stacks of the adapters that ran together lately.

    Args:
        max_bytes: of all of them, though never fewer than the one that runs.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self._max_bytes = max_bytes
        # Least recently used first.
        self._stacks: OrderedDict[frozenset[SpanAdapter], _Stack] = OrderedDict()

    def of(self, adapters: Iterable[SpanAdapter]) -> _Stack:
        """A stack that has them, and few more."""
        wanted = frozenset(adapters)
        found = (
            next(
                (held for held in reversed(self._stacks) if wanted <= held and len(held) <= _MAX_SPARE * len(wanted)),
                None,
            )
            if len(wanted) > 1
            else None
        )
        if found is not None:
            self._stacks.move_to_end(found)
            return self._stacks[found]
        stack = _Stack(sorted(wanted, key=id))
        if len(wanted) > 1:
            self._stacks[wanted] = stack
            while len(self._stacks) > 1 and sum(each.nbytes for each in self._stacks.values()) > self._max_bytes:
                self._stacks.popitem(last=False)
        return stack

    def forget(self, adapter: SpanAdapter) -> None:
        """The adapter is unloaded: what holds its weights is given back."""
        for held in [held for held in self._stacks if adapter in held]:
            del self._stacks[held]


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
        # Adjacent rows of one adapter are one segment.
        self._segments: list[tuple[SpanAdapter | None, int, int]] = []
        end = 0
        for adapter, group in itertools.groupby(rows, key=lambda row: row[0]):
            start, end = end, end + sum(num_tokens for _, num_tokens in group)
            self._segments.append((adapter, start, end))
        self.num_tokens = end
        adapters = {adapter for adapter, _, _ in self._segments if adapter is not None}
        self._stack = stacks.of(adapters) if end <= _MAX_STACKED_TOKENS else None
        self._device = device
        self._masks: dict[tuple[tuple[int, ...], ...], Tensor | None] = {}

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
                products.add(rows, output, self._others(self._stack, products))
            return
        for adapter, start, end in self._segments:
            if adapter is not None and (layer, place) in adapter.places:
                adapter.places[layer, place].add(rows[start:end], output[start:end], None)

    def _others(self, stack: _Stack, products: PlaceProducts) -> Tensor | None:
        if products.ranks not in self._masks:
            self._masks[products.ranks] = self._mask(stack, products)
        return self._masks[products.ranks]

    def _mask(self, stack: _Stack, products: PlaceProducts) -> Tensor | None:
        if len(self._segments) == 1 and len(stack.numbers) == 1:
            return None
        owners = torch.tensor(
            [number for ranks in products.ranks for number, rank in enumerate(ranks) for _ in range(rank)]
        )
        numbers = torch.empty(self.num_tokens, dtype=torch.int64)
        for adapter, start, end in self._segments:
            numbers[start:end] = -1 if adapter is None else stack.numbers[adapter]
        return (numbers.unsqueeze(1) != owners.unsqueeze(0)).to(self._device)
