"""Decides at start whether a server replays recorded decode steps, by comparing them with its ordinary steps."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.cache.store import SessionCache
from corolla.compute.attention.backends import TOLERANCES
from corolla.compute.attention.page_tables import PagedBackend
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.compute.decode_graphs import SIZES, DecodeGraphs
from corolla.compute.device import give_back, is_out_of_memory
from corolla.compute.span_runner import RowWork, SpanRunner
from corolla.models.adapters.products import LowRank, PlaceKey, SpanAdapter
from corolla.models.cuda_capture import Record
from corolla.models.fused import MixtureMlp
from corolla.models.span_model import SpanModel

log = logging.getLogger(__name__)

_CHECKED_STEPS: Final = 2
# Recorded steps are checked with an adapter of this rank for this layer.
_RANK: Final = 8
_ADAPTED: Final = "mlp.down_proj"
_NO_MEMORY: Final = "they do not fit into the memory of the device"


def choose_graphs(runner: SpanRunner, new_record: Callable[[], Record]) -> None:
    """Lets a runner replay recorded decode steps from now on, if their results equal those of its ordinary steps.

    Args:
        runner: a runner that is warmed up, with a scratch page and without sessions.
        new_record: makes a `Record` for each attempt, since an attempt that fails gives its recordings up.
    """
    failure: str | None = _NO_MEMORY
    for num_sizes in range(len(SIZES), 0, -1):
        # Where the memory lacks room for the largest step, smaller ones may have room.
        failure = _failure(runner, new_record(), SIZES[:num_sizes])
        if failure != _NO_MEMORY:
            break
        give_back(runner.model.device)
    if failure is not None:
        runner.decode_graphs = None
        log.warning("not using CUDA graphs for decode steps", extra={"failure": failure})


@torch.inference_mode()
def _failure(runner: SpanRunner, record: Record, ladder: Sequence[int]) -> str | None:
    """Sets up the replay of steps of these sizes.

    Returns:
        Why decode steps cannot be replayed, or None if the runner now replays them.
    """
    fused, refusal = runner.model.fused, _refusal(runner)
    if fused is None or refusal is not None:
        return refusal
    checked = _checked_rows(runner, ladder)
    if not checked:
        return "there are too few pages for a check"
    sizes = list(checked)
    try:
        like = torch.empty(0, runner.model.hidden_size, dtype=runner.model.dtype, device=runner.model.device)
        buffers = DecodeBuffers(runner.store, sizes[-1], _max_tokens(runner), like)
        graphs = DecodeGraphs(
            fused, len(runner.span), buffers, runner.backend, record, sizes, triton=runner.triton,
            low_rank=runner.low_rank,
        )  # fmt: skip
        adapters = [None] if runner.low_rank is None else [None, _made_up_adapter(runner.model)]
        for num_rows, adapter in itertools.product(itertools.chain(*checked.values()), adapters):
            error = _largest_error(runner, graphs, num_rows, adapter)
            if not error <= TOLERANCES[runner.model.dtype]:
                return f"with {num_rows} rows its results differ by {error:.1e} of their size"
    except Exception as error:
        # The server works without recordings, so no error of theirs may end it.
        if is_out_of_memory(error):
            return _NO_MEMORY
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    runner.decode_graphs = graphs
    log.info("using CUDA graphs for decode steps", extra={"sizes": " ".join(map(str, sizes))})
    return None


def _refusal(runner: SpanRunner) -> str | None:
    """Returns why no step of a runner can be recorded, or None if steps may be tried."""
    fused = runner.model.fused
    if fused is None:
        return "the blocks run with the family's own code"
    if runner.triton is None and any(isinstance(layer.mlp, MixtureMlp) for layer in fused.layers):
        return "the mixtures of experts run with the family's own code"
    if runner.model.long_rope is not None:
        return "the rotary embedding has other factors for long texts"
    if not isinstance(runner.backend, PagedBackend):
        return f"attention is {runner.backend.name}, which does not read pages through tables"
    return None


def _checked_rows(runner: SpanRunner, ladder: Sequence[int]) -> dict[int, Sequence[int]]:
    """The sizes to record, each with the numbers of rows to check: the fewest and the most that have pages."""
    checked: dict[int, Sequence[int]] = {}
    for smaller, size in zip((0, *ladder), ladder, strict=False):
        fitting = [
            num_rows
            for num_rows in range(smaller + 1, size + 1)
            if _num_pages(runner, num_rows) <= runner.store.pool.num_available
        ]
        if fitting:
            checked[size] = sorted({fitting[0], fitting[-1]})
    return checked


def _max_tokens(runner: SpanRunner) -> int:
    """The longest session whose steps are replayed: the model's maximum length, or what fits into all pages."""
    pool = runner.store.pool
    num_slots = pool.num_pages * pool.page_tokens
    return min(num_slots, getattr(runner.model.config, "max_position_embeddings", num_slots))


def _lengths(runner: SpanRunner, num_rows: int) -> list[int]:
    """How many tokens each row holds before the check. The first row reaches the end of a page during the check."""
    longest = min(runner.store.pool.page_tokens - 1, runner.store.rules[0].max_step_tokens)
    return [longest, *(row % 5 for row in range(1, num_rows))]


def _num_pages(runner: SpanRunner, num_rows: int) -> int:
    cache = runner.new_cache()
    return sum(cache.worst_case(length + _CHECKED_STEPS) for length in _lengths(runner, num_rows))


def _made_up_adapter(model: SpanModel) -> SpanAdapter:
    """An adapter of one layer in each block."""
    generator = torch.Generator().manual_seed(0)
    places: dict[PlaceKey, list[LowRank]] = {}
    for layer in range(len(model.span)):
        found = model.linear_place(layer, _ADAPTED)
        if found is not None:
            down, up = (
                torch.randn(_RANK, size, generator=generator).mul_(size**-0.5).to(model.device, model.dtype)
                for size in found.shape
            )
            places[layer, found.place] = [LowRank(down, up, found.first_column)]
    return SpanAdapter(places)


def _largest_error(runner: SpanRunner, graphs: DecodeGraphs, num_rows: int, adapter: SpanAdapter | None) -> float:
    """The largest relative error of a row's replayed output, compared with the runner's ordinary steps.

    The second step reads the keys and values that the first one wrote.
    """
    generator = torch.Generator().manual_seed(num_rows)

    def draw(num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, runner.model.hidden_size, generator=generator)

    lengths = _lengths(runner, num_rows)
    # Each second row has none.
    adapters = [adapter if index % 2 == 0 else None for index in range(num_rows)]
    caches = [runner.new_cache() for _ in lengths]
    try:
        for cache, length in zip(caches, lengths, strict=True):
            cache.allocate(length + _CHECKED_STEPS)
        written = [RowWork(cache, 0, length) for cache, length in zip(caches, lengths, strict=True) if length]
        if written:
            runner.forward(written, draw(sum(lengths)), runner.span)
        inputs = [draw(num_rows) for _ in range(_CHECKED_STEPS)]
        # The replays come first, so that they cannot read keys and values that the ordinary steps wrote.
        runner.decode_graphs = graphs
        num_replays = graphs.num_replays
        found = _steps(runner, caches, lengths, inputs, adapters)
        if graphs.num_replays - num_replays != _CHECKED_STEPS:
            raise RuntimeError(f"steps of {num_rows} rows were not replayed")
        runner.decode_graphs = None
        expected = _steps(runner, caches, lengths, inputs, adapters)
        return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    finally:
        runner.decode_graphs = None
        for cache in caches:
            cache.clear()


def _steps(
    runner: SpanRunner,
    caches: list[SessionCache],
    lengths: list[int],
    inputs: list[Tensor],
    adapters: Sequence[SpanAdapter | None],
) -> Tensor:
    """The outputs of one new token of each row, step by step: float32 `[steps, rows, H]`."""
    outputs: list[Tensor] = []
    for step, hidden in enumerate(inputs):
        rows = [
            RowWork(cache, length + step, 1, adapter=adapter)
            for cache, length, adapter in zip(caches, lengths, adapters, strict=True)
        ]
        outputs.append(runner.forward(rows, hidden, runner.span).float())
    return torch.stack(outputs)
