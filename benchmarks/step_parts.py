"""What a decode step of a span consists of: the family's own code beside fused blocks, operator by operator.

    python -m benchmarks.step_parts --blocks 15

Both run one token after a prompt, in one thread. Times of operators are those of torch's profiler; what is left of a
step that ran without the profiler is Python and the dispatch of operators.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.command import interleaved, run
from benchmarks.figures import Figure, figure, ratio
from corolla.cache.store import SessionCache
from corolla.compute.base import RowWork
from corolla.compute.span_runner import SpanRunner
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import DEMO_MODEL
from corolla.models.span_model import load_span
from corolla.wire.span import Span

_PRODUCTS: Final = "products with the weights"
_ATTENTION: Final = "attention"
_STORING: Final = "storing keys and values"
_ELEMENTS: Final = "norms, rotation, activation, sums"
_BETWEEN: Final = "Python and dispatch"
_STEP: Final = "whole step"

_PARTS: Final = {
    "mm": _PRODUCTS, "addmm": _PRODUCTS, "linear": _PRODUCTS, "matmul": _PRODUCTS, "bmm": _PRODUCTS,
    "mkldnn::_linear_pointwise": _PRODUCTS,
    "index_copy_": _STORING, "index_put_": _STORING, "_index_put_impl_": _STORING,
}  # fmt: skip
_MICROSECONDS: Final = 1e6


class _Side:
    """A runner, and a session in it whose next token is computed again and again."""

    def __init__(self, checkpoint: Checkpoint, span: Span, num_cached_tokens: int, *, is_fused: bool) -> None:
        model = load_span(checkpoint, span, dtype=torch.float32)
        self._runner = SpanRunner(model, is_fused=is_fused)
        self._span = span
        self._position = num_cached_tokens
        self._cache: SessionCache = self._runner.new_cache()
        self._cache.reserve(num_cached_tokens + 1)
        hidden = torch.randn(num_cached_tokens, checkpoint.hidden_size, generator=torch.Generator().manual_seed(0))
        self._runner.forward([RowWork(self._cache, 0, num_cached_tokens)], hidden, span)
        self._token = hidden[:1].clone()

    def parts_us(self, num_steps: int) -> dict[str, float]:
        """Microseconds of one step, by part."""
        times_s = []
        for _ in range(num_steps):
            started_s = time.perf_counter()
            self._step()
            times_s.append(time.perf_counter() - started_s)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(num_steps):
                self._step()
        parts: Counter[str] = Counter()
        for event in profiler.key_averages():
            parts[_part_of(event.key)] += event.self_cpu_time_total / num_steps
        step_us = _MICROSECONDS * statistics.median(times_s)
        return {**parts, _BETWEEN: max(0.0, step_us - sum(parts.values())), _STEP: step_us}

    def _step(self) -> None:
        self._runner.forward([RowWork(self._cache, self._position, 1)], self._token, self._span)


def _part_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    if "scaled_dot_product" in name:
        return _ATTENTION
    return _PARTS.get(name, _ELEMENTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--cached-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30, help="of each round, with the profiler and without")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(1)
    checkpoint = Checkpoint.from_pretrained(DEMO_MODEL)
    make = partial(_Side, checkpoint, Span(0, options.blocks), options.cached_tokens)
    sides = {"the family's own": make(is_fused=False), "fused": make(is_fused=True)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}

    def step_us(name: str) -> float:
        parts = sides[name].parts_us(options.steps)
        found[name].append(parts)
        return parts[_STEP]

    steps_us = interleaved({name: partial(step_us, name) for name in sides}, options.rounds)
    for part in (_PRODUCTS, _ATTENTION, _STORING, _ELEMENTS, _BETWEEN, _STEP):
        for name in sides:
            # The first round warmed up.
            yield figure(f"{part}, {name}", "us", [parts.get(part, 0.0) for parts in found[name][1:]])
    yield ratio("a step, fused against the family's own", steps_us["fused"], steps_us["the family's own"])


if __name__ == "__main__":
    run(__doc__, add_options, measure)
