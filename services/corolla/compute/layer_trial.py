"""Runs a text of random inputs through one layer, by its modules and as a part of whole blocks, in several cuts.

All tensors are on the device of the layer, in the dtype of hidden states.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.cache.store import KVStore
from corolla.compute.attention.base import AttentionBackend
from corolla.compute.base import Blocks, PackedStep, RowWork
from corolla.compute.fused_blocks import FusedBlocks
from corolla.kernels.kernel_trial import relative_error
from corolla.models.adapters.products import AdapterStacks
from corolla.models.fused import FusedLayer, FusedSpan, MixtureMlp

# The tokens that a trial computes one by one after its chunk, with a page's end between them.
_AROUND_THE_END: Final = 3

Cut = tuple[tuple[tuple[int, int], ...], int]
"""Parts `[start, end)` of the text, and how many tokens of another session run along with each part."""


class LayerTrial:
    """A text of a page and three tokens.

    Args:
        layer: the layer's index within the blocks.
        own: runs the layer by its modules.
        new_blocks: makes the blocks that are tried, which keep keys, values and states in a store.
        new_store: makes a store with so many pages for the layer.
        backend: the attention.
        page_tokens: tokens of a page.
        like: `[0, H]`, a tensor like hidden states.
        takes_median: whether the error in half precision is that of the median token: rounding may choose another
            expert for a token, or go on in a state.

    Attributes:
        cuts: the whole text, and other cuts and mixtures. Next to a chunk, a single token has the kernel of single
            tokens, and a companion of two tokens has not.
    """

    def __init__(
        self,
        layer: int,
        own: Blocks,
        new_blocks: Callable[[KVStore], Blocks],
        new_store: Callable[[int], KVStore],
        backend: AttentionBackend,
        page_tokens: int,
        like: Tensor,
        *,
        takes_median: bool,
    ) -> None:
        self._layer, self._own, self._new_blocks, self._new_store = layer, own, new_blocks, new_store
        self._backend, self._takes_median = backend, takes_median
        num_tokens = page_tokens + _AROUND_THE_END
        half, last = page_tokens // 2 + 1, max(0, num_tokens - 2 * _AROUND_THE_END)
        whole, halves = ((0, num_tokens),), ((0, half), (half, num_tokens))
        singles = (*(((0, last),) if last else ()), *((start, start + 1) for start in range(last, num_tokens)))
        self.cuts: tuple[Cut, ...] = ((whole, 0), (halves, 0), (halves, 1), (singles, 0), (singles, 2))
        self._pages_of_text = -(-num_tokens // page_tokens)
        self._hidden = torch.randn(num_tokens, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like)

    @classmethod
    def of_fused(
        cls,
        layer: FusedLayer,
        new_blocks: Callable[[FusedSpan, KVStore], Blocks],
        backend: AttentionBackend,
        page_tokens: int,
        dtype: torch.dtype,
        codec: KVCodec | None = None,
    ) -> "LayerTrial":
        """The trial of a fused layer; `new_blocks` gets a span with this layer only, and `codec` is that of caches."""
        span = FusedSpan([layer])
        return cls(
            0,
            FusedBlocks(span, AdapterStacks()),
            functools.partial(new_blocks, span),
            lambda num_pages: KVStore(num_pages, page_tokens, [layer.window], codec=codec),
            backend,
            page_tokens,
            torch.empty(0, layer.hidden_size, dtype=dtype, device=layer.device),
            takes_median=isinstance(layer.mlp, MixtureMlp),
        )

    def error(self, found: Tensor) -> float:
        """The largest difference from the layer's modules, relative to the largest number.

        Args:
            found: `[T, H]`, the outputs of the whole text.
        """
        if not self._takes_median or found.element_size() != 2:
            return relative_error(found, self._expected)
        differences = (found.float() - self._expected.float()).abs().amax(-1).nan_to_num(torch.inf)
        return float(differences.median() / self._expected.float().abs().max())

    @functools.cached_property
    def _expected(self) -> Tensor:
        return torch.cat([*self._outputs(self.cuts[0], lambda _store: self._own)])

    def run(self, cut: Cut) -> Iterator[Tensor]:
        """Yields the text's outputs by the blocks that are tried, `[tokens of the part, H]` for each part."""
        return self._outputs(cut, self._new_blocks)

    def _outputs(self, cut: Cut, new_blocks: Callable[[KVStore], Blocks]) -> Iterator[Tensor]:
        parts, company = cut
        num_tokens, count = len(self._hidden), 2 if company else 1
        store = self._new_store(count * self._pages_of_text)
        blocks = new_blocks(store)
        caches = [store.new_cache() for _ in range(count)]
        for cache in caches:
            cache.reserve(num_tokens)
        for start, end in parts:
            # The companion is before the text, with another number of tokens.
            others = [(caches[-1], 0, min(company, num_tokens))] if company else []
            rows = [RowWork(cache, first, last - first) for cache, first, last in [*others, (caches[0], start, end)]]
            for row in rows:
                row.cache.truncate(row.position)
                row.cache.prepare(row.position, row.num_tokens)
            step = PackedStep.of(rows, store, self._backend, self._hidden.device)
            hidden = torch.cat([self._hidden[row.position : row.position + row.num_tokens] for row in rows])
            output = blocks.forward(step, hidden, (self._layer,))
            for row in rows:
                row.cache.commit(row.position + row.num_tokens)
            yield output[-(end - start) :]
