"""Chooses the next tokens of several sequences at once: the same tokens that each `Sampler` chooses alone.

The logits may be on any device. Biases, penalties, grammars, filters, choice and log probabilities run once for all
rows, with one wait for the device, for the tokens and all log probabilities. Random numbers come from each sampler's
own stream on the CPU, so a session gets the same numbers on whichever server it continues.

What a row gets does not depend on the other rows. So sums over the vocabulary are not left to scans of GPUs, which add
in another order for another number of rows.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.nucleus import NO_SHARE, drawn_from_nucleus, keep_nucleus
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.penalties import StackedPenalties
from corolla.decoding.random_streams import streams_of
from corolla.decoding.sampling import (
    Draw,
    Sampler,
    barred,
    exponential_numbers,
)
from corolla.wire.device_copies import await_copies, begin_reading, on_device

Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a chosen token, and the ids and log probabilities of the most probable ones."""


@dataclass(frozen=True, slots=True)
class LaunchedChoice:
    """Choices that a device may not have made yet. Each must be finished before its sampler chooses again.

    Attributes:
        token_ids: the chosen tokens, int64 `[R]` on the device; a row that gets an error has any token there.
        finish: waits for the tokens and returns them, or errors, as `sample_together` does; it is called once.
    """

    token_ids: Tensor
    finish: Callable[[], list[SampledToken | CorollaError]]


def sample_together(
    samplers: Sequence[Sampler], logits: Tensor, *, like_gpu: bool | None = None
) -> list[SampledToken | CorollaError]:
    """One token for each row of `logits`, float32 `[R, V]`, by the sampler of the same index; no sampler occurs twice.

    A row that is not finite, or whose grammar fails, gets an error, and its sampler takes no token.

    Args:
        like_gpu: see `launch_choice`.
    """
    return launch_choice(samplers, logits, like_gpu=like_gpu).finish()


@torch.inference_mode()
def launch_choice(samplers: Sequence[Sampler], logits: Tensor, *, like_gpu: bool | None = None) -> LaunchedChoice:
    """Launches what `sample_together` does: all but the reading of the chosen tokens.

    Args:
        samplers: no one occurs twice.
        logits: float32 `[R, V]`, on the device of the samplers' earlier choices.
        like_gpu: whether to compute as on a GPU; None: only if the logits are not on a CPU. On a CPU, sums and the
            order of equal scores are those of `transformers`.
    """
    like_gpu = logits.device.type != "cpu" if like_gpu is None else like_gpu
    scores = _Scores(samplers, logits)
    # `max` takes NaN for the largest number, so the best score shows whether a row has one.
    best = scores.rows.max(dim=-1)
    token_ids, are_finite = best.indices, best.values.isfinite()
    drawing = [
        index for index, sampler in enumerate(samplers) if not sampler.params.is_greedy and index not in scores.failures
    ]
    if drawing:
        numbers = _random_numbers([samplers[index] for index in drawing], logits, like_gpu=like_gpu)
        params = [samplers[index].params for index in drawing]
        drawn = _drawn(_rows(scores.rows, drawing), params, numbers, like_gpu=like_gpu)
        token_ids = _with_rows(token_ids, drawing, drawn)
    logprobs = _Logprobs(samplers, logits, token_ids)
    # float64 holds every token id and every float32, so one copy brings all that the device found.
    read = begin_reading(torch.cat((token_ids.double(), are_finite.double(), *logprobs.found)))
    scores.add(token_ids, are_finite)

    def finish() -> list[SampledToken | CorollaError]:
        found = read().tolist()
        for index in drawing:
            samplers[index].use_draw()
        logprobs_of = logprobs.read(found[2 * len(samplers) :])
        chosen: list[SampledToken | CorollaError] = []
        for index, sampler in enumerate(samplers):
            if index in scores.failures:
                chosen.append(scores.failures[index])
            elif not found[len(samplers) + index]:
                chosen.append(NonFiniteOutput("The model's output is not finite."))
            else:
                token_id = int(found[index])
                sampler.follow(token_id)
                chosen.append(SampledToken(token_id, *logprobs_of.get(index, ())))
        return chosen

    return LaunchedChoice(token_ids, finish)


def _random_numbers(samplers: Sequence[Sampler], logits: Tensor, *, like_gpu: bool) -> Tensor:
    """The random numbers of the samplers' next choices, float32 `[samplers, V]` on the device of `logits`."""
    num_logits, device = logits.shape[-1], logits.device
    if not like_gpu:
        return torch.stack([sampler.random_numbers(num_logits, device) for sampler in samplers])
    if (streams := streams_of(device)) is None:
        return exponential_numbers(torch.stack([each.random_outputs(num_logits, device) for each in samplers]))
    streams.draw_ahead(samplers, num_logits)
    await_copies(device)
    draws = [sampler.draw_there for sampler in samplers]
    if (whole := _whole(draws)) is not None:
        return whole

    def own(sampler: Sampler, draw: tuple[Draw, int] | None) -> Tensor:
        if draw is None:
            return exponential_numbers(sampler.random_outputs(num_logits, device))
        return draw[0].numbers[draw[1]]

    return torch.stack(list(map(own, samplers, draws)))


def _whole(draws: Sequence[tuple[Draw, int] | None]) -> Tensor | None:
    """The numbers of one draw, if these are all its rows in their order."""
    if (first := draws[0]) is None or len(first[0].numbers) != len(draws):
        return None
    is_whole = all(each is not None and each[0] is first[0] and each[1] == at for at, each in enumerate(draws))
    return first[0].numbers if is_whole else None


class _Logprobs:
    """The log probabilities of the rows whose samplers want some, still on the device.

    Args:
        logits: the model's own, float32 `[R, V]`.
        token_ids: the chosen tokens, int64 `[R]`, on the same device.

    Attributes:
        found: float64 tensors of one dimension, on that device, whose numbers `read` takes one after another.
    """

    def __init__(self, samplers: Sequence[Sampler], logits: Tensor, token_ids: Tensor) -> None:
        wanting: defaultdict[int, list[int]] = defaultdict(list)
        for index, sampler in enumerate(samplers):
            if sampler.params.num_logprobs is not None:
                wanting[min(sampler.params.num_logprobs, logits.shape[-1])].append(index)
        self._wanting = wanting
        self.found: list[Tensor] = []
        for number, indices in wanting.items():
            logprobs = _rows(logits, indices).log_softmax(dim=-1)
            top = logprobs.topk(number)
            own = logprobs.gather(1, _rows(token_ids, indices).unsqueeze(1))
            self.found.append(torch.cat((own.double(), top.indices.double(), top.values.double()), dim=1).flatten())

    def read(self, found: Iterable[float]) -> dict[int, Logprobs]:
        """The log probabilities by row, of the numbers of all tensors in `found`."""
        numbers = iter(found)
        logprobs: dict[int, Logprobs] = {}
        for number, indices in self._wanting.items():
            for index in indices:
                own, *top = itertools.islice(numbers, 1 + 2 * number)
                logprobs[index] = own, tuple(zip(map(int, top[:number]), top[number:], strict=True))
        return logprobs


class _Scores:
    """Holds the scores that decide which tokens are chosen.

    Attributes:
        rows: float32 `[R, V]`, on the device of the logits.
        failures: the errors of the rows whose scores failed.
    """

    def __init__(self, samplers: Sequence[Sampler], logits: Tensor) -> None:
        self.failures: dict[int, CorollaError] = {}
        allowed: dict[int, bytes] = {}
        for index, sampler in enumerate(samplers):
            try:
                if (bits := sampler.allowed()) is not None:
                    allowed[index] = bits
            except CorollaError as failure:
                self.failures[index] = failure.with_traceback(None)
        vocabulary_size, device = logits.shape[-1], logits.device
        rows = logits
        if biased := [index for index, sampler in enumerate(samplers) if sampler.params.logit_bias]:
            biases = torch.stack([samplers[index].biases(vocabulary_size, device) for index in biased])
            rows = _replaced(rows, biased, lambda own: own + biases)
        self._penalised = [index for index, sampler in enumerate(samplers) if sampler.params.has_penalties]
        if self._penalised:
            penalties = [samplers[index].penalties(vocabulary_size) for index in self._penalised]
            self._penalties = StackedPenalties.of(penalties, device)
            rows = _replaced(rows, self._penalised, self._penalties.apply)
        if allowed:
            bars = barred(list(allowed.values()), vocabulary_size, device)
            rows = _replaced(rows, list(allowed), lambda own: own + bars)
        self.rows = rows

    def add(self, token_ids: Tensor, are_finite: Tensor) -> None:
        """Counts the chosen tokens, int64 `[R]`, of the rows that have not failed; `are_finite` is bool `[R]`."""
        if not self._penalised:
            return
        if self.failures:
            have_scores = tuple(index not in self.failures for index in range(len(token_ids)))
            are_finite = are_finite & on_device(have_scores, token_ids.device, torch.bool)
        self._penalties.add(_rows(token_ids, self._penalised), _rows(are_finite, self._penalised))


def _drawn(scores: Tensor, params: Sequence[SamplingParams], numbers: Tensor, *, like_gpu: bool) -> Tensor:
    """The tokens drawn by the numbers, int64 `[R]`, among those that the filters of `transformers`, in its order, keep.

    A GPU draws without a filter for top-p where no other one follows.
    """
    vocabulary_size = scores.shape[-1]

    def column(values: Iterable[float]) -> Tensor:
        return on_device(tuple(values), scores.device, torch.float32).unsqueeze(1)

    def within_top_k(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        sizes = [min(each.top_k, vocabulary_size) for each in own]
        last = on_device(tuple(size - 1 for size in sizes), rows.device, torch.int64).unsqueeze(1)
        return rows.masked_fill(rows < rows.topk(max(sizes)).values.gather(1, last), -torch.inf)

    def within_top_p(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        shares = column(1 - each.top_p for each in own)
        if like_gpu:
            return keep_nucleus(rows, shares)
        # The order of equal scores and the sums of a CPU are those of `transformers`.
        ascending, indices = rows.sort()
        is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= shares
        is_removed.select(1, -1).fill_(False)
        return rows.masked_fill(is_removed.scatter(1, indices, is_removed), -torch.inf)

    def above_min_p(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        probabilities = rows.softmax(dim=-1)
        least = column(each.min_p for each in own) * probabilities.amax(dim=-1, keepdim=True)
        return rows.masked_fill(probabilities < least, -torch.inf)

    scores = scores / column(each.temperature for each in params)
    scores = _where(scores, params, lambda each: each.top_k != 0, within_top_k)
    scores = _where(scores, params, lambda each: each.top_p < 1 and not (like_gpu and each.min_p == 0), within_top_p)
    scores = _where(scores, params, lambda each: each.min_p > 0, above_min_p)
    if like_gpu:
        shares = tuple(NO_SHARE if each.min_p > 0 or each.top_p == 1 else 1 - each.top_p for each in params)
        return drawn_from_nucleus(scores, numbers, shares)
    return (scores.softmax(dim=-1) / numbers).argmax(dim=-1)


def _where(
    scores: Tensor,
    params: Sequence[SamplingParams],
    wants: Callable[[SamplingParams], bool],
    apply: Callable[[Tensor, Sequence[SamplingParams]], Tensor],
) -> Tensor:
    """The scores after a filter. The filter runs only on the rows that want it."""
    wanting = [index for index, each in enumerate(params) if wants(each)]
    return _replaced(scores, wanting, lambda rows: apply(rows, [params[index] for index in wanting]))


def _replaced(scores: Tensor, indices: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """The scores with other numbers in the rows `indices`; `change` makes them."""
    return _with_rows(scores, indices, change(_rows(scores, indices))) if indices else scores


def _rows(every: Tensor, indices: Sequence[int]) -> Tensor:
    """The rows `indices`, which are in order; each occurs once."""
    if len(indices) == len(every):
        return every
    return every[on_device(tuple(indices), every.device, torch.int64)]


def _with_rows(every: Tensor, indices: Sequence[int], rows: Tensor) -> Tensor:
    """A tensor with other `rows` at `indices`, which are in order; each occurs once."""
    if len(indices) == len(every):
        return rows
    return every.index_copy(0, on_device(tuple(indices), every.device, torch.int64), rows)
