"""The block servers' own code, all blocks in this process: what a chain costs beyond it is the chain's doing."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.timing import Timing
from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import load_edges
from corolla.models.span_model import load_span
from corolla.wire.span import Span
from corolla.wire.tensors import DTYPES

_CHUNK_TOKENS = 256


class LocalBlocks:
    """Embedding, the runner over the whole model, and the head, in a plain loop."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: str = "float32", quantization: str = "none", kv_cache_dtype: str = "auto"
    ) -> None:
        self._span = Span(0, checkpoint.num_blocks)
        self._edges = load_edges(checkpoint, dtype=DTYPES[dtype], quantization=quantization)
        self._edges.choose_products()
        self.model = load_span(checkpoint, self._span, dtype=DTYPES[dtype], quantization=quantization)
        self._runner = SpanRunner(self.model, kv_cache_dtype=kv_cache_dtype)

    @property
    def cache_bytes_per_token(self) -> float:
        """The bytes of all blocks' caches; they are known once something was computed."""
        return self._runner.store.page_bytes / self._runner.store.pool.page_tokens

    def answer(self, prompt_ids: Sequence[int], num_tokens: int, num_threads: int = 1) -> Timing:
        """Greedily, without end tokens."""
        torch.set_num_threads(num_threads)
        cache = self._new_cache(len(prompt_ids) + num_tokens)
        stamps: list[float] = []
        started_s = time.perf_counter()
        new, position = torch.tensor(list(prompt_ids)), 0
        for _ in range(num_tokens):
            hidden = self._run(cache, new, position)
            position += len(new)
            new = self._edges.head(hidden[-1:]).argmax(dim=-1)
            stamps.append(time.perf_counter())
        cache.clear()
        return Timing(started_s, tuple(stamps))

    def negative_log_likelihoods(self, token_ids: Sequence[int]) -> Tensor:
        """float32 `[T - 1]`, in nats: how little each token but the first was expected after those before it."""
        ids = torch.tensor(list(token_ids))
        cache = self._new_cache(len(ids))
        hidden = self._run(cache, ids, 0)
        cache.clear()
        logits = self._edges.head(hidden[:-1])
        return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")

    def _new_cache(self, num_tokens: int) -> SessionCache:
        cache = self._runner.new_cache()
        cache.reserve(num_tokens)
        return cache

    def _run(self, cache: SessionCache, token_ids: Tensor, position: int) -> Tensor:
        outputs = []
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            chunk = token_ids[start : start + _CHUNK_TOKENS]
            first = position + start
            embedded = self._edges.embed(chunk, torch.arange(first, first + len(chunk)))
            outputs.append(self._runner.forward([RowWork(cache, first, len(chunk))], embedded, self._span))
        return torch.cat(outputs)
