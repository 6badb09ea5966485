"""How fast this machine computes one block of the model, measured at start."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from corolla.block_server.runner import RowWork, Runner
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span

_PREFILL_TOKENS: Final = 64
_REPETITIONS: Final = 5
# Enough for single rows, which are tuned first.
_TUNING_BUDGET_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one block: tokens per second, and bytes that a token's keys and values take."""

    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    cache_bytes_per_token: int


def measure_speed(checkpoint: Checkpoint, dtype: torch.dtype, device: str, quantization: str = "none") -> Speed:
    """Times the model's first block with one token and with a short prompt; the best of a few runs each."""
    block = Span(0, 1)
    model = load_span(checkpoint, block, dtype=dtype, device=device, quantization=quantization)
    runner = Runner(model, num_pages=1, page_tokens=2 * _PREFILL_TOKENS, tuning_budget_s=_TUNING_BUDGET_S)
    cache = runner.new_cache()
    cache.reserve(_PREFILL_TOKENS + 1)

    def run(position: int, num_tokens: int) -> Callable[[], object]:
        hidden = torch.zeros(num_tokens, checkpoint.hidden_size, dtype=dtype)
        return lambda: runner.run([RowWork(cache, position, num_tokens)], hidden, block)

    prefill_s = _best_seconds(run(0, _PREFILL_TOKENS))
    decode_s = _best_seconds(run(_PREFILL_TOKENS, 1))
    return Speed(1 / decode_s, _PREFILL_TOKENS / prefill_s, cache.nbytes // (2 * _PREFILL_TOKENS))


def _best_seconds(work: Callable[[], object]) -> float:
    durations = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return max(min(durations), 1e-9)
