"""How fast this machine computes one block of the model, measured at start."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from corolla.compute.runner import RowWork, Runner
from corolla.compute.threads import set_num_threads
from corolla.models.checkpoint import Checkpoint
from corolla.models.edges import head_bytes
from corolla.models.families import recurrent_layers
from corolla.models.span_model import SpanModel, make_span
from corolla.wire.span import Span

_PREFILL_TOKENS: Final = 64
_REPETITIONS: Final = 5
_LATEST_STEPS: Final = 64
# Enough for single rows, which are tuned first.
_TUNING_BUDGET_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Speed:
    """Of the largest block with keys and values: tokens per second, and bytes that these take; with how many threads.

    `head_blocks`: as many blocks take the time of the model's head for one row, and its memory. `block_bytes`: of the
    weights of the largest block of any kind.
    """

    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    cache_bytes_per_token: int
    num_threads: int
    head_blocks: float
    block_bytes: int


class DecodeSpeed:
    """Tokens per second through one block, one row at a time, as the latest such steps show it.

    The best of them counts: what else the machine did meanwhile is not the server's speed, unless it never stops. So it
    can be compared with that of another server, whatever the two have to do.
    """

    def __init__(self) -> None:
        self._seconds_per_block: deque[float] = deque(maxlen=_LATEST_STEPS)

    def observe(self, seconds: float, num_blocks: int) -> None:
        """A step of one token through `num_blocks`."""
        self._seconds_per_block.append(max(seconds, 1e-9) / num_blocks)

    @property
    def tokens_per_second(self) -> float:
        """0 before the first step."""
        return 1 / min(self._seconds_per_block) if self._seconds_per_block else 0.0


def measure_decode_step(runner: Runner) -> float:
    """Seconds of one token through all blocks of the runner's span; the best of a few. Uses one page meanwhile."""
    return _best_seconds(runner.warm_up)


def measure_speed(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    quantization: str = "none",
    num_threads: int = 1,
    new_runner: Callable[..., Runner] = Runner,
) -> Speed:
    """Times the model's largest block with one token and with a short prompt; the best of a few runs each.

    Its weights are made up: speed does not depend on them, and a server that the router has no span for yet should not
    fetch any.

    Args:
        num_threads: of this process, from now on; 0 takes those with which the block is fastest.
        new_runner: `Runner` with this server's settings.
    """

    def made(number: int = checkpoint.largest_block) -> SpanModel:
        block = Span(number, number + 1)
        return make_span(checkpoint, block, dtype=dtype, device=device, quantization=quantization)

    trial = _Trial(made(), new_runner)

    def seconds() -> float:
        # Both matter alike, and neither hides the other.
        return math.sqrt(trial.prefill_s() * trial.decode_s())

    num_threads = set_num_threads(num_threads, seconds)
    prefill_s, decode_s = trial.prefill_s(), trial.decode_s()
    others = (made(other).nbytes for other in checkpoint.largest_blocks if other != checkpoint.largest_block)
    block_bytes = max(trial.model.nbytes, *others, 0)
    # Where no block keeps keys and values, what pages stand for are states.
    bytes_per_token = (
        trial.page_bytes_per_token
        or _page_bytes(checkpoint, dtype, device, new_runner)
        or max(1, trial.bytes_per_token)
    )
    # One row takes the time of reading the weights, so bytes tell it. To make a head up may take gigabytes.
    head_blocks = head_bytes(checkpoint, dtype, quantization) / block_bytes
    return Speed(1 / decode_s, _PREFILL_TOKENS / prefill_s, bytes_per_token, num_threads, head_blocks, block_bytes)


class _Trial:
    """A short prompt and the next token, through one block."""

    def __init__(self, model: SpanModel, new_runner: Callable[..., Runner]) -> None:
        self.model = model
        self._runner = new_runner(model, num_pages=1, page_tokens=2 * _PREFILL_TOKENS, tuning_budget_s=_TUNING_BUDGET_S)
        self._cache = self._runner.new_cache()
        self._cache.reserve(_PREFILL_TOKENS + 1)

    def prefill_s(self) -> float:
        return self._seconds(0, _PREFILL_TOKENS)

    def decode_s(self) -> float:
        return self._seconds(_PREFILL_TOKENS, 1)

    @property
    def page_bytes_per_token(self) -> int:
        """Of keys and values, once it has run."""
        return self._runner.store.page_bytes // (2 * _PREFILL_TOKENS)

    @property
    def bytes_per_token(self) -> int:
        """The same with recurrent states."""
        return self._cache.nbytes // (2 * _PREFILL_TOKENS)

    def _seconds(self, position: int, num_tokens: int) -> float:
        hidden = torch.zeros(num_tokens, self.model.hidden_size, dtype=self.model.dtype)
        # A text with long factors may have any length.
        rows = [RowWork(self._cache, position, num_tokens, long_factors=True)]
        return _best_seconds(lambda: self._runner.forward(rows, hidden, self.model.span))


def _page_bytes(checkpoint: Checkpoint, dtype: torch.dtype, device: str, new_runner: Callable[..., Runner]) -> int:
    """Bytes of a token's keys and values in a block that keeps some; 0: none does."""
    block = Span(checkpoint.caching_block, checkpoint.caching_block + 1)
    model = make_span(checkpoint, block, dtype=dtype, device=device)
    runner = new_runner(model, num_pages=1, page_tokens=1, attention="auto", is_fused=False)
    runner.warm_up()
    return runner.store.page_bytes


def state_bytes(model: SpanModel) -> int:
    """Bytes of the recurrent states of one session at one position."""
    if not recurrent_layers(model.config):
        return 0
    runner = Runner(model, num_pages=1, is_fused=False)
    runner.warm_up()
    return sum(shape.nbytes for shape in runner.store.state_shapes.values())


def _best_seconds(work: Callable[[], object]) -> float:
    durations = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        durations.append(time.perf_counter() - started)
    return max(min(durations), 1e-9)
