"""Chooses the next tokens of several sequences at once: the same tokens that each `Sampler` chooses alone.

The logits may be on any device. Biases, penalties, grammars, filters, choice and log probabilities run once for all
rows, with one wait for the device for the tokens, and one for each number of log probabilities. Random numbers come
from each sampler's own stream on the CPU, so a session gets the same numbers on whichever server it continues.

What a row gets does not depend on the other rows. So sums over the vocabulary are not left to scans of GPUs, which add
in another order for another number of rows.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler, TokenPenalties, barred, exponential_numbers

# Probabilities as integers of this many bits; a sum of them is below two to the power of 63.
_PROBABILITY_BITS: Final = 52

Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a chosen token, and the ids and log probabilities of the most probable ones."""


@torch.inference_mode()
def sample_together(samplers: Sequence[Sampler], logits: Tensor) -> list[SampledToken | CorollaError]:
    """One token for each row of `logits`, float32 `[R, V]`, by the sampler of the same index; no sampler occurs twice.

    A row that is not finite, or whose grammar fails, gets an error, and its sampler takes no token.
    """
    scores, failures = _scores(samplers, logits)
    # `max` takes NaN for the largest number, so the best score shows whether a row has one.
    best = scores.max(dim=-1)
    token_ids = best.indices
    drawing = [
        index for index, sampler in enumerate(samplers) if not sampler.params.is_greedy and index not in failures
    ]
    if drawing:
        rows = torch.tensor(drawing, device=logits.device)
        filtered = _filtered(scores[rows], [samplers[index].params for index in drawing])
        numbers = _random_numbers([samplers[index] for index in drawing], logits)
        token_ids = token_ids.index_copy(0, rows, (filtered.softmax(dim=-1) / numbers).argmax(dim=-1))
    logprobs = _logprobs(samplers, logits, token_ids)
    chosen_ids, are_finite = torch.stack((token_ids, best.values.isfinite().long())).tolist()
    chosen: list[SampledToken | CorollaError] = []
    for index, (sampler, token_id, is_finite) in enumerate(zip(samplers, chosen_ids, are_finite, strict=True)):
        if index in failures:
            chosen.append(failures[index])
        elif not is_finite:
            chosen.append(NonFiniteOutput("The model's output is not finite."))
        else:
            sampler.add(token_id)
            chosen.append(SampledToken(token_id, *logprobs.get(index, ())))
    return chosen


def _random_numbers(samplers: Sequence[Sampler], logits: Tensor) -> Tensor:
    """The random numbers of the samplers' next choices, float32 `[samplers, V]` on the device of `logits`."""
    num_logits, device = logits.shape[-1], logits.device
    if device.type == "cpu":
        return torch.stack([sampler.random_numbers(num_logits, device) for sampler in samplers])
    return exponential_numbers(torch.stack([sampler.random_outputs(num_logits, device) for sampler in samplers]))


def _logprobs(samplers: Sequence[Sampler], logits: Tensor, token_ids: Tensor) -> dict[int, Logprobs]:
    """The log probabilities of the rows whose samplers want some, by row.

    Args:
        logits: the model's own, float32 `[R, V]`.
        token_ids: the chosen tokens, int64 `[R]`, on the same device.
    """
    wanting: defaultdict[int, list[int]] = defaultdict(list)
    for index, sampler in enumerate(samplers):
        if sampler.params.num_logprobs is not None:
            wanting[sampler.params.num_logprobs].append(index)
    found: dict[int, Logprobs] = {}
    for number, indices in wanting.items():
        rows = torch.tensor(indices, device=logits.device)
        logprobs = logits[rows].log_softmax(dim=-1)
        top = logprobs.topk(min(number, logits.shape[-1]))
        own = logprobs.gather(1, token_ids[rows].unsqueeze(1))
        # float64 holds every token id and every float32, so one copy brings all.
        for index, (logprob, *best) in zip(
            indices, torch.cat((own.double(), top.indices.double(), top.values.double()), dim=1).tolist(), strict=True
        ):
            ids, values = best[: len(best) // 2], best[len(best) // 2 :]
            found[index] = logprob, tuple(zip(map(int, ids), values, strict=True))
    return found


def _scores(samplers: Sequence[Sampler], logits: Tensor) -> tuple[Tensor, dict[int, CorollaError]]:
    """The scores by which tokens are chosen, float32 `[R, V]`, and the errors of the rows whose scores failed."""
    failures: dict[int, CorollaError] = {}
    allowed: dict[int, bytes] = {}
    for index, sampler in enumerate(samplers):
        try:
            if (bits := sampler.allowed()) is not None:
                allowed[index] = bits
        except CorollaError as failure:
            failures[index] = failure.with_traceback(None)
    vocabulary_size, device = logits.shape[-1], logits.device
    scores = logits
    if biased := [index for index, sampler in enumerate(samplers) if sampler.params.logit_bias]:
        biases = torch.stack([samplers[index].biases(logits[index]) for index in biased])
        scores = _replaced(scores, biased, lambda rows: rows + biases)
    if penalised := [index for index, sampler in enumerate(samplers) if sampler.params.has_penalties]:
        penalties = [samplers[index].penalties(vocabulary_size) for index in penalised]
        scores = _replaced(scores, penalised, lambda rows: TokenPenalties.apply_together(penalties, rows))
    if allowed:
        bars = barred(list(allowed.values()), vocabulary_size, device)
        scores = _replaced(scores, list(allowed), lambda rows: rows + bars)
    return scores, failures


def _filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The scores, with minus Inf for tokens that the filters of `transformers`, in its order, exclude."""
    vocabulary_size = scores.shape[-1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores.device).unsqueeze(1)

    def within_top_k(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        sizes = [min(each.top_k, vocabulary_size) for each in own]
        last = torch.tensor(sizes, device=rows.device).unsqueeze(1) - 1
        return rows.masked_fill(rows < rows.topk(max(sizes)).values.gather(1, last), -torch.inf)

    def within_top_p(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        # The order of equal scores and the sums of a CPU are those of `transformers`.
        on_cpu = rows.device.type == "cpu"
        ascending, indices = rows.sort(stable=not on_cpu)
        probabilities, shares = ascending.softmax(dim=-1), column([1 - each.top_p for each in own])
        is_removed = probabilities.cumsum(dim=-1) <= shares if on_cpu else within_shares(probabilities, shares)
        is_removed[:, -1] = False
        return rows.masked_fill(is_removed.scatter(1, indices, is_removed), -torch.inf)

    def above_min_p(rows: Tensor, own: Sequence[SamplingParams]) -> Tensor:
        probabilities = rows.softmax(dim=-1)
        least = column([each.min_p for each in own]) * probabilities.amax(dim=-1, keepdim=True)
        return rows.masked_fill(probabilities < least, -torch.inf)

    scores = scores / column([each.temperature for each in params])
    scores = _where(scores, params, lambda each: each.top_k != 0, within_top_k)
    scores = _where(scores, params, lambda each: each.top_p < 1, within_top_p)
    return _where(scores, params, lambda each: each.min_p > 0, above_min_p)


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
    """The scores with other numbers in the rows `indices`, which are in order; `change` makes them."""
    if not indices:
        return scores
    if len(indices) == len(scores):
        return change(scores)
    rows = torch.tensor(indices, device=scores.device)
    return scores.index_copy(0, rows, change(scores[rows]))


def within_shares(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Which first tokens of each row together have at most the row's share of probability.

    Sums of integers do not depend on the order of the additions, which on a GPU depends on the number of rows.

    Args:
        probabilities: float32 `[R, V]`.
        shares: float32 `[R, 1]`, on the same device.

    Returns:
        bool `[R, V]`, on the same device.
    """
    scale = float(1 << _PROBABILITY_BITS)
    return (probabilities.double() * scale).long().cumsum(dim=-1) <= (shares.double() * scale).long()
