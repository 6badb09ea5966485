"""Measures at start how fast this machine computes one block of the model. Plans use it; no kernel is chosen by it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from corolla.chassis.processors import available_cores, is_cpu
from corolla.compute.base import RowWork
from corolla.compute.sizes import cache_bytes_per_token
from corolla.compute.span_runner import SpanRunner
from corolla.compute.threads import num_threads_for
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import head_bytes
from corolla.models.span_model import SpanModel, empty_span, make_span
from corolla.wire.span import Span

_PREFILL_TOKENS: Final = 64
_REPETITIONS: Final = 5
_LATEST_STEPS: Final = 64
# This is more than caches of devices hold.
_COPIED_BYTES: Final = 256 << 20
_COPIES: Final = 4


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed and size of the model's largest block.

    Attributes:
        decode_tokens_per_second: tokens per second through that block, one token at a time.
        prefill_tokens_per_second: tokens per second of a short prompt through that block.
        cache_bytes_per_token: bytes of one token's keys and values in one block; if no block has any, of its states.
        num_threads: the number of threads with which the speed was measured.
        head_blocks: how many blocks together take the time and memory of the model's head for one row.
        block_bytes: bytes of the weights of the largest block of any kind.
    """

    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    cache_bytes_per_token: int
    num_threads: int
    head_blocks: float
    block_bytes: int


class DecodeSpeed:
    """Tokens per second through one block, from the latest steps of a single row.

    The fastest of these steps counts, since other work of the machine slows the rest. So the speeds of two servers can
    be compared whatever their load is.
    """

    def __init__(self) -> None:
        self._seconds_per_block: deque[float] = deque(maxlen=_LATEST_STEPS)

    def observe(self, seconds: float, num_blocks: int) -> None:
        """Records a step of one token through `num_blocks` blocks."""
        self._seconds_per_block.append(max(seconds, 1e-9) / num_blocks)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second through one block; 0 before the first step."""
        return 1 / min(self._seconds_per_block) if self._seconds_per_block else 0.0


def measure_bandwidth(
    device: torch.device, num_bytes: int = _COPIED_BYTES, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second that a device reads and writes while it copies a tensor: the best of a few runs.

    Args:
        num_bytes: the bytes of the tensor; more than the device's caches hold.
        clock: returns seconds.
    """
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(_COPIES):
            target.copy_(source)
        target[-1].item()  # waits for the device

    return 2 * _COPIES * num_bytes / _best_seconds(copy, clock)


def measure_decode_step(runner: SpanRunner) -> float:
    """Seconds of one token through all blocks of the runner's span: the best of a few runs, which use one page."""
    return _best_seconds(runner.warm_up)


def measure_speed(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    num_threads: int = 1,
    new_runner: Callable[..., SpanRunner] = SpanRunner,
) -> Speed:
    """Times the model's largest block with one token and with a short prompt; the best of a few runs each.

    The block has random weights: speed does not depend on them, and a server that has no span yet should not download
    any.

    Args:
        kv_cache_dtype: how keys and values are stored; see `SpanRunner`.
        num_threads: threads that this process computes with from now on; 0: as many as the rule of `threads` has for
            this block, and 1 for a device other than a CPU, which computes by itself.
        new_runner: makes a `SpanRunner` with this server's settings, so that the measured code is what will run.
    """

    def made(number: int = checkpoint.largest_block) -> SpanModel:
        block = Span(number, number + 1)
        return make_span(checkpoint, block, dtype=dtype, device=device, quantization=quantization)

    if not num_threads:
        largest = Span(checkpoint.largest_block, checkpoint.largest_block + 1)
        num_weights = sum(each.numel() for each in empty_span(checkpoint, largest, dtype).parameters())
        num_threads = num_threads_for(num_weights, available_cores()) if is_cpu(device) else 1
    torch.set_num_threads(num_threads)
    model = made()
    # This many pages are enough, even if a page has one token.
    runner = new_runner(model, num_pages=_PREFILL_TOKENS + 1)
    cache = runner.new_cache()
    cache.reserve(_PREFILL_TOKENS + 1)

    def seconds(position: int, num_tokens: int) -> float:
        hidden = torch.zeros(num_tokens, model.hidden_size, dtype=dtype)
        # Long factors of a longrope embedding allow any length.
        rows = [RowWork(cache, position, num_tokens, long_factors=True)]
        return _best_seconds(lambda: runner.forward(rows, hidden, model.span))

    prefill_s, decode_s = seconds(0, _PREFILL_TOKENS), seconds(_PREFILL_TOKENS, 1)
    others = (made(other).nbytes for other in checkpoint.largest_blocks if other != checkpoint.largest_block)
    block_bytes = max(model.nbytes, *others, 0)
    bytes_per_token = cache_bytes_per_token(checkpoint, dtype, kv_cache_dtype)
    # One row takes as long as reading the weights, so bytes are enough. A head to measure could take gigabytes.
    head_blocks = head_bytes(checkpoint, dtype, quantization) / block_bytes
    return Speed(1 / decode_s, _PREFILL_TOKENS / prefill_s, bytes_per_token, num_threads, head_blocks, block_bytes)


def _best_seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    durations = []
    for _ in range(_REPETITIONS):
        started = clock()
        work()
        durations.append(clock() - started)
    return max(min(durations), 1e-9)
