"""Runs a text of random inputs through one layer, by its modules and as a part of whole blocks, in several cuts.

All tensors are on the device of the layer, in the dtype of hidden states.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.cache.store import KVStore, SessionCache
from corolla.compute.attention.base import AttentionBackend, PackedRow
from corolla.compute.base import Blocks, PackedStep
from corolla.compute.fused_blocks import FusedBlocks
from corolla.kernels.kernel_trial import relative_error
from corolla.models.adapters.products import AdapterStacks
from corolla.models.fused import FusedLayer, FusedSpan, MixtureMlp

# The tokens that a trial computes one by one after its chunk, with a page's end between them.
_AROUND_THE_END: Final = 3

Cut = tuple[tuple[tuple[int, int], ...], int]
"""Parts `[start, end)` of the text, and how many tokens of another session run along with each part."""


def cuts_of(page_tokens: int) -> tuple[int, tuple[Cut, ...]]:
    """How many tokens the text of a trial has, and its cuts: the whole text, and other cuts and mixtures.

    Next to a chunk, a single token has the kernel of single tokens, and a companion of two tokens has not.

    Args:
        page_tokens: tokens of a page.
    """
    num_tokens = page_tokens + _AROUND_THE_END
    half, last = page_tokens // 2 + 1, max(0, num_tokens - 2 * _AROUND_THE_END)
    whole, halves = ((0, num_tokens),), ((0, half), (half, num_tokens))
    singles = (*(((0, last),) if last else ()), *((start, start + 1) for start in range(last, num_tokens)))
    return num_tokens, ((whole, 0), (halves, 0), (halves, 1), (singles, 0), (singles, 2))


class LayerTrial:
    """A text of a page and three tokens.

    Args:
        layer: the layer.
        new_blocks: makes whole blocks of a span with this layer only and of a store.
        backend: the attention.
        page_tokens: tokens of a page.
        dtype: the dtype of hidden states.
        codec: see `KVStore`.

    Attributes:
        cuts: see `cuts_of`.
    """

    def __init__(
        self,
        layer: FusedLayer,
        new_blocks: Callable[[FusedSpan, KVStore], Blocks],
        backend: AttentionBackend,
        page_tokens: int,
        dtype: torch.dtype,
        codec: KVCodec | None = None,
    ) -> None:
        self._layer, self._new_blocks, self._backend = layer, new_blocks, backend
        self._page_tokens, self._codec = page_tokens, codec
        self._span = FusedSpan([layer])
        self._num_tokens, self.cuts = cuts_of(page_tokens)
        numbers = torch.randn(self._num_tokens, layer.hidden_size, generator=torch.Generator().manual_seed(0))
        self._hidden = numbers.to(device=layer.device, dtype=dtype)

    def error(self, found: Tensor) -> float:
        """The largest difference from the layer's modules, relative to the largest number.

        Of a mixture in half precision, it is that of the median token: where two experts have nearly the same score,
        rounding decides which of them a token gets.

        Args:
            found: `[T, H]`, the outputs of the whole text.
        """
        expected = self._expected
        if not isinstance(self._layer.mlp, MixtureMlp) or found.element_size() != 2:
            return relative_error(found, expected)
        differences = (found.float() - expected.float()).abs().amax(-1).nan_to_num(torch.inf)
        return float(differences.median() / expected.float().abs().max())

    @functools.cached_property
    def _expected(self) -> Tensor:
        modules = FusedBlocks(self._span, AdapterStacks())
        return torch.cat(list(self._outputs(self.cuts[0], lambda _span, _store: modules)))

    def run(self, cut: Cut) -> Iterator[Tensor]:
        """Yields the text's outputs by whole blocks, `[tokens of the part, H]` for each part."""
        return self._outputs(cut, self._new_blocks)

    def _outputs(self, cut: Cut, new_blocks: Callable[[FusedSpan, KVStore], Blocks]) -> Iterator[Tensor]:
        parts, company = cut
        count = 2 if company else 1
        num_pages = count * (-(-self._num_tokens // self._page_tokens))
        store = KVStore(num_pages, self._page_tokens, [self._layer.window], codec=self._codec)
        caches = [store.new_cache() for _ in range(count)]
        for cache in caches:
            cache.reserve(self._num_tokens)
        blocks = new_blocks(self._span, store)
        for start, end in parts:
            # The companion is before the text, with another number of tokens.
            others = [(caches[-1], 0, min(company, self._num_tokens))] if company else []
            yield self._step(store, [*others, (caches[0], start, end)], blocks)[-(end - start) :]

    def _step(self, store: KVStore, parts: Sequence[tuple[SessionCache, int, int]], blocks: Blocks) -> Tensor:
        rows: list[PackedRow] = []
        for cache, start, end in parts:
            cache.truncate(start)
            cache.prepare(start, end - start)
            first = rows[-1].end if rows else 0
            rows.append(PackedRow(cache, start, first, first + end - start))
        hidden = torch.cat([self._hidden[start:end] for _, start, end in parts])
        positions = torch.cat([torch.arange(start, end, device=hidden.device) for _, start, end in parts])
        step = PackedStep((), positions, self._num_tokens, self._backend.batch(store, rows, hidden.device)[0])
        output = blocks.forward(step, hidden, range(1))
        for cache, _, end in parts:
            cache.commit(end)
        return output
