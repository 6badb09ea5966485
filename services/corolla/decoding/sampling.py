"""Chooses the next tokens of several sequences at once, on the device of the logits.

Biases, penalties, grammars, filters, choice and log probabilities run once for all rows, with one wait for the device,
for the tokens and all log probabilities. What a row gets does not depend on the other rows.

The filters are those of `generate` of `transformers`: top-k (Fan et al. 2018, "Hierarchical Neural Story Generation"),
top-p (Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration") and min-p (Nguyen et al. 2024, "Turning Up
the Heat"); the repetition penalty is that of CTRL (Keskar et al. 2019). A token is drawn by a race (`race`), which is
the Gumbel-max trick without logarithms of probabilities. Its random numbers follow from the seed, the token's position
in the answer, and its id.
"""

import copy
import functools
import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.penalties import StackedPenalties, TokenPenalties
from corolla.decoding.race import drawn, racers
from corolla.wire.device_copies import begin_reading, on_device, picked, to_device, with_rows


class Sampler:
    """What the next choice for one sequence depends on.

    Args:
        params: without a seed, the sampler takes a fresh one.
        prompt_ids: the tokens before the answer; only penalties use them.
        generated_ids: tokens of the answer that were chosen already; only penalties use them.
        position: how many tokens of the answer were chosen already.
        grammar: a grammar that has read the tokens of the answer and that no other sampler uses; the sampler never
            chooses tokens that would break it.

    Attributes:
        seed: the seed of the answer, of 64 bits.
        position: where in the answer the next token is.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        position: int = 0,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.params = params
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) % (1 << 64)
        self.position = position
        self._grammar = grammar
        self._bias: Tensor | None = None
        self._past: tuple[Sequence[int], Sequence[int]] = (tuple(prompt_ids), tuple(generated_ids))
        self._penalties: TokenPenalties | None = None

    @property
    def adjusts_logits(self) -> bool:
        """True if tokens are chosen by other scores than the model's own."""
        return self.looks_back or bool(self.params.logit_bias)

    @property
    def looks_back(self) -> bool:
        """True if a choice depends on the tokens before it, and not only on their number."""
        return self.has_grammar or self.params.has_penalties

    @property
    def has_grammar(self) -> bool:
        """True if a grammar bars tokens."""
        return self._grammar is not None

    def allowed(self) -> bytes | None:
        """Returns a bit for each token: 1 if the grammar allows the token next. Returns None if there is no grammar.

        Any thread may call this before the logits are there, so that the choice finds the bits.

        Raises:
            InvalidRequest: the grammar has become too complex; the next choice raises the same.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def biases(self, num_logits: int, device: torch.device) -> Tensor:
        """The bias of each token, float32 `[V]` on `device`."""
        # A fork may read logits of another device, such as those of a draft model.
        if self._bias is None or self._bias.device != device:
            bias = torch.zeros(num_logits, dtype=torch.float32)
            token_ids, biases = zip(*self.params.logit_bias, strict=True)
            bias[list(token_ids)] = torch.tensor(biases, dtype=torch.float32)
            self._bias = to_device(bias, device, bias.dtype)
        return self._bias

    def penalties(self, vocabulary_size: int) -> TokenPenalties:
        """The penalties of the sequence, up to the last token that was added."""
        if self._penalties is None:
            prompt_ids, generated_ids = self._past
            self._penalties = TokenPenalties(
                prompt_ids,
                generated_ids,
                repetition=self.params.repetition_penalty,
                presence=self.params.presence_penalty,
                frequency=self.params.frequency_penalty,
                vocabulary_size=vocabulary_size,
            )
            self._past = ((), ())
        return self._penalties

    def take(self, token_id: int) -> None:
        """Advances position and grammar by the chosen token, which `StackedPenalties.add` counts."""
        self.position += 1
        if self._grammar is not None:
            self._grammar.add(token_id)

    def fork(self) -> "Sampler":
        """An independent sampler that chooses the same next tokens as this one, without log probabilities."""
        copied = copy.copy(self)
        copied.params = replace(self.params, num_logprobs=None)
        if self._penalties is not None:
            copied._penalties = self._penalties.copy()
        if self._grammar is not None:
            copied._grammar = self._grammar.fork()
        return copied


def barred(allowed: Sequence[bytes], num_logits: int, device: torch.device) -> Tensor:
    """Numbers to be added to scores, so that a NaN stays NaN: minus Inf for barred tokens, and 0 for others.

    Args:
        allowed: for each row, one bit for each token, as `Sampler.allowed` returns them; all of one length.

    Returns:
        float32 `[R, V]` on `device`.
    """
    groups = to_device(torch.frombuffer(bytearray(b"".join(allowed)), dtype=torch.uint8), device, torch.uint8).int()
    return _barred_of_byte(device)[groups].view(len(allowed), -1)[:, :num_logits]


@functools.cache
def _barred_of_byte(device: torch.device) -> Tensor:
    """A float32 `[256, 8]` table: for each value of a byte, 0 or minus Inf for each of its eight bits."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.zeros(256, 8, dtype=torch.float32).masked_fill(bits == 0, -torch.inf).to(device)


Logprobs = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a chosen token, and the ids and log probabilities of the most probable ones."""


@dataclass(frozen=True, slots=True)
class LaunchedChoice:
    """Choices that a device may not have made yet. Each must be finished before its sampler chooses again.

    Attributes:
        token_ids: the chosen tokens, int64 `[R]` on the device; a row that gets an error has any token there.
        finish: waits for the tokens and returns them, or errors; it is called once. Samplers do not take the tokens.
    """

    token_ids: Tensor
    finish: Callable[[], list[SampledToken | CorollaError]]


def sample_together(samplers: Sequence[Sampler], logits: Tensor) -> list[SampledToken | CorollaError]:
    """One token for each row of `logits`, float32 `[R, V]`, by the sampler of the same index, which takes the token.

    No sampler occurs twice. A row that is not finite, or whose grammar fails, gets an error, and its sampler takes
    nothing.
    """
    chosen = launch_choice(samplers, logits).finish()
    for sampler, token in zip(samplers, chosen, strict=True):
        if isinstance(token, SampledToken):
            sampler.take(token.token_id)
    return chosen


@torch.inference_mode()
def launch_choice(samplers: Sequence[Sampler], logits: Tensor, num_before: Sequence[int] = ()) -> LaunchedChoice:
    """Launches the choice of a token for each row: all but the reading of the chosen tokens.

    Args:
        samplers: one may occur several times if it does not look back; see `Sampler.looks_back`.
        logits: float32 `[R, V]`, on the device of the samplers' earlier choices.
        num_before: how many tokens the answer has before each row's token, without those that its sampler has taken;
            empty: none.
    """
    scores = _Scores(samplers, logits)
    positions = [each.position + more for each, more in zip(samplers, num_before or [0] * len(samplers), strict=True)]
    # Rows that are not finite get -1.
    found = _chosen(scores.rows, samplers, positions)
    token_ids = found.clamp(min=0)
    logprobs = _Logprobs(samplers, logits, token_ids)
    # float64 holds every token id and every float32, so one copy brings all that the device found.
    read = begin_reading(torch.cat((found.double(), *logprobs.found)))
    scores.add(token_ids, found >= 0)

    def finish() -> list[SampledToken | CorollaError]:
        numbers = read().tolist()
        logprobs_of = logprobs.read(numbers[len(samplers) :])
        chosen: list[SampledToken | CorollaError] = []
        for index, number in enumerate(numbers[: len(samplers)]):
            if index in scores.failures:
                chosen.append(scores.failures[index])
            elif number < 0:
                chosen.append(NonFiniteOutput("The model's output is not finite."))
            else:
                chosen.append(SampledToken(int(number), *logprobs_of.get(index, ())))
        return chosen

    return LaunchedChoice(token_ids, finish)


def _chosen(scores: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> Tensor:
    """The most probable tokens of greedy rows, and the drawn ones of others: int64 `[R]`; see `launch_choice`."""
    drawing = [index for index, sampler in enumerate(samplers) if not sampler.params.is_greedy]
    found = scores.new_empty(len(scores), dtype=torch.int64)
    if len(drawing) < len(scores):
        # `max` takes NaN for the largest number, so the best score shows whether a row has one.
        best = scores.max(dim=-1)
        found = torch.where(best.values.isfinite(), best.indices, -1)
    if drawing:
        own = [samplers[index] for index in drawing]
        rows = _probabilities(picked(scores, drawing), [each.params for each in own])
        racing = racers(
            rows,
            [each.seed for each in own],
            [positions[index] for index in drawing],
            [each.params.top_p for each in own],
            [each.params.min_p for each in own],
        )
        found = with_rows(found, drawing, drawn(rows, racing))
    return found


def _probabilities(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The probabilities among which tokens are drawn, float32 `[R, V]`: after temperature and top-k."""
    if any(each.temperature != 1 for each in params):
        temperatures = on_device(tuple(each.temperature for each in params), scores.device, torch.float32)
        scores = scores / temperatures.unsqueeze(1)
    if limited := [index for index, each in enumerate(params) if each.top_k != 0]:
        sizes = [min(params[index].top_k, scores.shape[-1]) for index in limited]
        last = on_device(tuple(size - 1 for size in sizes), scores.device, torch.int64).unsqueeze(1)

        def within_top_k(rows: Tensor) -> Tensor:
            return rows.masked_fill(rows < rows.topk(max(sizes)).values.gather(1, last), -torch.inf)

        scores = _replaced(scores, limited, within_top_k)
    return scores.softmax(dim=-1)


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
            logprobs = picked(logits, indices).log_softmax(dim=-1)
            top = logprobs.topk(number)
            own = logprobs.gather(1, picked(token_ids, indices).unsqueeze(1))
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
            self._penalties = StackedPenalties.stacked(penalties, device)
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
        self._penalties.add(picked(token_ids, self._penalised), picked(are_finite, self._penalised))


def _replaced(scores: Tensor, indices: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """The scores with other numbers in the rows `indices`; `change` makes them."""
    return with_rows(scores, indices, change(picked(scores, indices))) if indices else scores
