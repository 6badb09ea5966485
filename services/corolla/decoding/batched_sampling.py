"""Chooses the next tokens of several sequences at once: the same tokens that each `Sampler` chooses alone.

The logits may be on any device. Filters and choice run once for all rows, with one wait for the device. Random numbers
come from each sampler's own stream on the CPU, so a session gets the same numbers on whichever server it continues.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler


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
        numbers = torch.stack([samplers[index].random_numbers(logits.shape[-1], logits.device) for index in drawing])
        token_ids = token_ids.index_copy(0, rows, (filtered.softmax(dim=-1) / numbers).argmax(dim=-1))
    chosen_ids, are_finite = torch.stack((token_ids, best.values.isfinite().long())).tolist()
    chosen: list[SampledToken | CorollaError] = []
    for index, (sampler, token_id, is_finite) in enumerate(zip(samplers, chosen_ids, are_finite, strict=True)):
        if index in failures:
            chosen.append(failures[index])
        elif not is_finite:
            chosen.append(NonFiniteOutput("The model's output is not finite."))
        else:
            sampler.add(token_id)
            chosen.append(sampler.with_logprobs(token_id, logits[index]))
    return chosen


def _scores(samplers: Sequence[Sampler], logits: Tensor) -> tuple[Tensor, dict[int, CorollaError]]:
    """The scores by which tokens are chosen, float32 `[R, V]`, and the errors of the rows whose scores failed."""
    failures: dict[int, CorollaError] = {}
    if not any(sampler.adjusts_logits for sampler in samplers):
        return logits, failures
    rows: list[Tensor] = []
    for index, (sampler, row) in enumerate(zip(samplers, logits, strict=True)):
        try:
            rows.append(sampler.scores(row))
        except CorollaError as failure:
            failures[index] = failure.with_traceback(None)
            rows.append(row)
    return torch.stack(rows), failures


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
        ascending, indices = rows.sort()
        is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= column([1 - each.top_p for each in own])
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
    if not wanting:
        return scores
    if len(wanting) == len(params):
        return apply(scores, params)
    rows = torch.tensor(wanting, device=scores.device)
    return scores.index_copy(0, rows, apply(scores[rows], [params[index] for index in wanting]))
