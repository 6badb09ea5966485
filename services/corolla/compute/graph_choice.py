"""Decides at start whether a server replays recorded decode steps, by comparing them with its ordinary steps."""

import itertools
import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.compute.base import RecordableBlocks, RowWork
from corolla.compute.decode_buffers import DecodeBuffers
from corolla.compute.decode_graphs import SIZES, DecodeGraphs
from corolla.compute.device import give_back, is_out_of_memory
from corolla.compute.span_runner import SpanRunner
from corolla.kernels.kernel_trial import are_same, reason_of
from corolla.kernels.page_tables import MOST_PART_BYTES
from corolla.models.adapters.products import LowRank, PlaceKey, SpanAdapter
from corolla.models.cuda_capture import Record
from corolla.models.span_model import SpanModel

log = logging.getLogger(__name__)

# Recorded steps are checked with an adapter of this rank for this layer.
_RANK: Final = 8
_ADAPTED: Final = "mlp.down_proj"
_NO_MEMORY: Final = "they do not fit into the memory of the device"


def choose_graphs(runner: SpanRunner, new_record: Callable[[], Record]) -> None:
    """Lets a runner replay recorded decode steps from now on, if their results have the bits of its ordinary steps.

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
    blocks = runner.blocks
    if not isinstance(blocks, RecordableBlocks):
        # Operators of torch round by the size of a step, and a recorded step is padded.
        return f"the blocks run as {blocks.name}, which gives a row other bits in steps of other sizes"
    if runner.model.long_rope is not None:
        return "the rotary embedding has other factors for long texts"
    checked = _checked_rows(runner, ladder)
    if not checked:
        return "there are too few pages for a check"
    sizes, steps = list(checked), _steps(checked)
    began_s = time.perf_counter()
    try:
        like = torch.empty(0, runner.model.hidden_size, dtype=runner.model.dtype, device=runner.model.device)
        # A recording has room for the results of so many pages. With more of them it would attend as chunks do.
        most_pages = MOST_PART_BYTES // max(1, blocks.page_part_bytes)
        buffers = DecodeBuffers(runner.store, sizes[-1], _max_tokens(runner), like, most_pages)
        graphs = DecodeGraphs(blocks, buffers, runner.backend, record, sizes, len(runner.span))
        recorded_s = time.perf_counter() - began_s
        adapters = [None] if blocks.low_rank is None else [None, _made_up_adapter(runner.model)]
        for adapter in adapters:
            if (num_rows := _differing_step(runner, graphs, steps, adapter)) is not None:
                return f"with {num_rows} rows its results differ"
    except Exception as error:
        # The server works without recordings, so no error of theirs may end it.
        if is_out_of_memory(error):
            return _NO_MEMORY
        return reason_of(error)
    runner.decode_graphs = graphs
    checked_s = time.perf_counter() - began_s - recorded_s
    seconds = {"recorded_s": round(recorded_s, 2), "checked_s": round(checked_s, 2)}
    log.info("using CUDA graphs for decode steps", extra={"sizes": " ".join(map(str, sizes)), **seconds})
    return None


def _checked_rows(runner: SpanRunner, ladder: Sequence[int]) -> dict[int, Sequence[int]]:
    """The sizes to record, each with the numbers of rows to check: the fewest and the most that have pages."""
    checked: dict[int, Sequence[int]] = {}
    for smaller, size in zip((0, *ladder), ladder, strict=False):
        fewest = smaller + 1
        for most in range(size, smaller, -1):
            tried = {**checked, size: sorted({fewest, most})}
            if _num_pages(runner, _steps(tried)) <= runner.store.pool.num_available:
                checked = tried
                break
    return checked


def _steps(checked: Mapping[int, Sequence[int]]) -> list[int]:
    """The numbers of rows of the steps of a check. The last step reads what each row has written in another one."""
    steps = list(itertools.chain(*checked.values()))
    return [*steps, *steps[-1:]]


def _max_tokens(runner: SpanRunner) -> int:
    """The longest session whose steps are replayed: the model's maximum length, or what fits into all pages."""
    pool = runner.store.pool
    num_slots = pool.num_pages * pool.page_tokens
    return min(num_slots, getattr(runner.model.config, "max_position_embeddings", num_slots))


def _lengths(runner: SpanRunner, num_rows: int) -> list[int]:
    """How many tokens each row holds before the check. The first row reaches the end of a page during the check."""
    # One ordinary step computes the tokens that a row holds and all its new ones, so both together are limited.
    longest = min(runner.store.pool.page_tokens - 1, max(0, runner.store.rules[0].max_step_tokens - 2 * len(SIZES) - 1))
    return [longest, *(row % 5 for row in range(1, num_rows))]


def _shares(steps: Sequence[int]) -> list[int]:
    """How many tokens each row gets in steps with these numbers of rows: the first rows have a part in each."""
    return [sum(row < num_rows for num_rows in steps) for row in range(max(steps))]


def _num_pages(runner: SpanRunner, steps: Sequence[int]) -> int:
    cache, shares = runner.new_cache(), _shares(steps)
    return sum(map(cache.worst_case, map(operator.add, _lengths(runner, len(shares)), shares)))


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


def _differing_step(
    runner: SpanRunner, graphs: DecodeGraphs, steps: Sequence[int], adapter: SpanAdapter | None
) -> int | None:
    """Replays steps, one after another, and compares them with the runner's ordinary code.

    Each step reads the keys and values that the steps before it wrote. In the last step, the rows have another order.
    Then one ordinary step computes the new tokens of all rows together. It comes last, so that no replay can read keys
    and values that it wrote.

    Args:
        steps: the numbers of rows of the steps, which never fall: sessions join, and none leaves.
        adapter: the adapter of each second row; None: no row has one.

    Returns:
        The number of rows of the first step whose output has other bits; None: all steps have equal bits.
    """
    shares = _shares(steps)
    lengths = _lengths(runner, len(shares))
    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, runner.model.hidden_size, generator=generator)

    adapters = [adapter if index % 2 == 0 else None for index in range(len(shares))]
    caches = [runner.new_cache() for _ in shares]
    # The new tokens, row after row; a row gets its last one in the last step.
    inputs, ends = draw(sum(shares)), list(itertools.accumulate(shares))
    orders = [range(num_rows) for num_rows in steps]
    orders[-1] = orders[-1][::-1]
    tokens = [[ends[row] - len(steps) + step for row in order] for step, order in enumerate(orders)]
    try:
        for cache, length, share in zip(caches, lengths, shares, strict=True):
            cache.allocate(length + share)
        # Other tokens are in the place of the new ones, so that no replay finds keys and values of an earlier check.
        held = [length + share for length, share in zip(lengths, shares, strict=True)]
        rows = [RowWork(cache, 0, number) for cache, number in zip(caches, held, strict=True)]
        others = draw(sum(held))
        runner.forward(rows, others, runner.span)
        begun = [others[:0]] * len(caches)
        if runner.store.recurrent:
            # Sessions do not keep earlier states, so they begin anew, and the ordinary step at the end does, too.
            begun = [each[:length] for each, length in zip(torch.split(others, held), lengths, strict=True)]
            rows = [RowWork(cache, 0, length) for cache, length in zip(caches, lengths, strict=True) if length]
            runner.forward(rows, torch.cat(begun), runner.span)
        runner.decode_graphs = graphs
        num_replays = graphs.num_replays
        # All outputs are read at the end, so that a replay which writes over an earlier one is noticed.
        outputs = []
        for step, (order, indices) in enumerate(zip(orders, tokens, strict=True), -len(steps)):
            rows = [RowWork(caches[row], held[row] + step, 1, adapter=adapters[row]) for row in order]
            outputs.append(runner.forward(rows, inputs[indices], runner.span))
        if graphs.num_replays - num_replays != len(steps):
            raise RuntimeError("not all steps were replayed")
        runner.decode_graphs = None
        rows = [
            RowWork(cache, number - share - len(before), share + len(before), adapter=each)
            for cache, number, share, before, each in zip(caches, held, shares, begun, adapters, strict=True)
        ]
        whole = torch.cat([part for pair in zip(begun, torch.split(inputs, shares), strict=True) for part in pair])
        computed = torch.split(runner.forward(rows, whole, runner.span).cpu(), [row.num_tokens for row in rows])
        expected = torch.cat([each[len(each) - share :] for each, share in zip(computed, shares, strict=True)])
        found = zip(steps, outputs, tokens, strict=True)
        return next((size for size, output, indices in found if not are_same(output.cpu(), expected[indices])), None)
    finally:
        runner.decode_graphs = None
        for cache in caches:
            cache.clear()
