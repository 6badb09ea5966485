"""Which token comes next: the model's logits in, one token out, as `transformers`' own `generate` would choose."""

import copy
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from corolla.chassis.errors import InternalError, InvalidRequest, NonFiniteOutput
from corolla.client.generation.penalties import TokenPenalties
from corolla.client.generation.top_p import QuickTopP

MAX_LOGPROBS = 20

_MIN_TEMPERATURE = 1e-4
"""Below it `logits / temperature` leaves the range in which a float32 softmax has meaning; 0 is greedy."""

_STATE_HEADER = struct.Struct(">4sBI")
_STATE_MAGIC = b"CRNG"
_STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. The defaults are greedy, without penalties and without log probabilities.

    Args:
        temperature: 0 is greedy, which makes top-k, top-p and min-p irrelevant; else from 0.0001 to 100.
        top_k: only the k most probable tokens; 0 switches it off.
        top_p: only the most probable tokens that reach this mass together; 1 switches it off.
        min_p: only tokens at least this share as probable as the most probable one; 0 switches it off.
        repetition_penalty: over prompt and answer as in `transformers`, from 0.01 to 100; 1 switches it off.
        presence_penalty: over the answer as in the OpenAI API, from -2 to 2; 0 switches it off.
        frequency_penalty: as the presence penalty, times the number of occurrences.
        seed: equal seeds give equal answers; None draws a fresh one.
        num_logprobs: None for no log probabilities, 0 for that of the chosen token only, up to 20 for alternatives.

    Raises:
        InvalidRequest: with one violation per field that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        # Comparisons with NaN are false, so each row names the values that are allowed.
        in_range = {
            "temperature": (
                self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature <= 100,
                "must be 0 (greedy) or between 0.0001 and 100",
            ),
            "top_k": (self.top_k >= 0, "must not be negative; 0 switches it off"),
            "top_p": (0 < self.top_p <= 1, "must be more than 0 and at most 1; 1 switches it off"),
            "min_p": (0 <= self.min_p <= 1, "must be between 0 and 1; 0 switches it off"),
            "repetition_penalty": (
                0.01 <= self.repetition_penalty <= 100,
                "must be between 0.01 and 100; 1 switches it off",
            ),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "must be between -2 and 2; 0 switches it off"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "must be between -2 and 2; 0 switches it off"),
            "seed": (self.seed is None or -(2**63) <= self.seed < 2**64, "must be a 64 bit integer"),
            "num_logprobs": (
                self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
                f"must be between 0 and {MAX_LOGPROBS}",
            ),
        }
        violations = [(field, text) for field, (is_allowed, text) in in_range.items() if not is_allowed]
        if violations:
            raise InvalidRequest(*violations[0], *violations[1:])

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, so that no random number is drawn."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far matter to the choice."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token.

    `logprob` and `top_logprobs` (id and log probability, most probable first) are those of the model's own
    distribution, before penalties, temperature and filters; None and empty when none were asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence, and remembers what the next choice depends on.

    With a seed, the tokens equal those of `generate(do_sample=True, ...)` after `torch.manual_seed(seed)` on the CPU
    in float32: the same processors in the same order, and a generator of its own with the same stream.

    Args:
        params: how to choose.
        prompt_ids: the tokens before the answer; only penalties look at them.
        generated_ids: tokens of the answer that another sampler chose already, when its `state` is taken over.
        num_skipped: choices of other samplers with the same seed; the random stream goes on behind them.
        state: what `state()` gave; the random stream goes on from there, and `params.seed` has no effect.

    Raises:
        InternalError: `state` is not one, or is of another version.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        num_skipped: int = 0,
        state: bytes | None = None,
    ) -> None:
        self.params = params
        self._past: tuple[Sequence[int], Sequence[int]] = (tuple(prompt_ids), tuple(generated_ids))
        self._penalties: TokenPenalties | None = None
        self._warpers = _warpers(params)
        self._generator: torch.Generator | None = None
        self._num_skipped = num_skipped
        if state is not None:
            self._generator = _decode_state(state)
        if self._generator is None and not params.is_greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> SampledToken:
        """Chooses the next token and takes note of it.

        Args:
            logits: float32 [vocabulary] on the CPU; stays as it is.

        Among equal scores, greedy choice takes the one that `torch.argmax` takes.

        Raises:
            NonFiniteOutput: NaN or Inf among the logits, or nothing but minus Inf.
        """
        if logits.dim() != 1 or logits.dtype != torch.float32:
            raise InternalError("The sampler takes one row of float32 logits.")
        with torch.inference_mode():
            scores = self._penalised(logits)
            token_id = self._greedy(scores) if self.params.is_greedy else self._drawn(scores)
            if self._penalties is not None:
                self._penalties.add(token_id)
            return self._with_logprobs(token_id, logits)

    def fork(self) -> "Sampler":
        """A sampler that would choose the same next tokens, whatever becomes of this one; without log probabilities."""
        copied = copy.copy(self)
        copied.params = replace(self.params, num_logprobs=None)
        if self._penalties is not None:
            copied._penalties = self._penalties.copy()
        if self._generator is not None:
            copied._generator = torch.Generator().set_state(self._generator.get_state())
        return copied

    def state(self) -> bytes:
        """The random stream's place, 9 bytes for a greedy sampler and about 5 KB otherwise; never text or tokens."""
        stream = b"" if self._generator is None else self._generator.get_state().numpy().tobytes()
        return _STATE_HEADER.pack(_STATE_MAGIC, _STATE_VERSION, len(stream)) + stream

    def _penalised(self, logits: Tensor) -> Tensor:
        if not self.params.has_penalties:
            return logits
        if self._penalties is None:
            prompt_ids, generated_ids = self._past
            self._penalties = TokenPenalties(
                prompt_ids,
                generated_ids,
                repetition=self.params.repetition_penalty,
                presence=self.params.presence_penalty,
                frequency=self.params.frequency_penalty,
                vocabulary_size=logits.shape[0],
            )
            self._past = ((), ())
        return self._penalties.apply(logits)

    def _greedy(self, scores: Tensor) -> int:
        token_id = int(scores.argmax())
        # NaN counts as the largest number for argmax, so looking at the winner finds any.
        if not math.isfinite(scores[token_id].item()):
            raise NonFiniteOutput("The model's output is not finite.")
        return token_id

    def _drawn(self, scores: Tensor) -> int:
        if not math.isfinite(scores.max().item()):
            raise NonFiniteOutput("The model's output is not finite.")
        rows = scores.unsqueeze(0)
        for warper in self._warpers:
            rows = warper(_NO_IDS, rows)
        probabilities = rows.softmax(dim=-1)
        for _ in range(self._num_skipped):
            # How many numbers a draw takes depends on nothing but the vocabulary.
            torch.multinomial(probabilities, num_samples=1, generator=self._generator)
        self._num_skipped = 0
        return int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))

    def _with_logprobs(self, token_id: int, logits: Tensor) -> SampledToken:
        if self.params.num_logprobs is None:
            return SampledToken(token_id)
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(min(self.params.num_logprobs, logits.shape[0]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return SampledToken(token_id, float(logprobs[token_id]), tuple(pairs))


_NO_IDS = torch.empty((1, 0), dtype=torch.int64)
"""The warpers take the token ids and do not look at them."""


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """The processors that `generate` would apply when sampling, in its order."""
    warpers = LogitsProcessorList()
    if params.is_greedy:
        return warpers
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k != 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(QuickTopP(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


def _decode_state(state: bytes) -> torch.Generator | None:
    unreadable = InternalError("The sampler's state cannot be read.")
    if len(state) < _STATE_HEADER.size:
        raise unreadable
    magic, version, num_bytes = _STATE_HEADER.unpack_from(state)
    stream = state[_STATE_HEADER.size :]
    if (magic, version) != (_STATE_MAGIC, _STATE_VERSION) or len(stream) != num_bytes:
        raise unreadable
    if not stream:
        return None
    generator = torch.Generator()
    try:
        generator.set_state(torch.frombuffer(bytearray(stream), dtype=torch.uint8))
    except RuntimeError as error:
        raise unreadable from error
    return generator
