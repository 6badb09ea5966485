"""Chooses the next token from the model's logits, as `generate` of `transformers` would.

The filters are top-k (Fan et al. 2018, "Hierarchical Neural Story Generation"), top-p (Holtzman et al. 2019, "The
Curious Case of Neural Text Degeneration") and min-p (Nguyen et al. 2024, "Turning Up the Heat"); the repetition penalty
is that of CTRL (Keskar et al. 2019). A token is drawn as `torch.multinomial` does: the largest quotient of probability
and a number from an exponential distribution wins, which is the Gumbel-max trick without logarithms.
"""

import copy
import functools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from corolla.chassis.errors import InternalError, NonFiniteOutput
from corolla.decoding.device_rows import Slot
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.penalties import TokenPenalties
from corolla.decoding.random_jump import Words, moved_on, with_words
from corolla.wire.device_copies import begin_copy, empty_to_copy, to_device

_STATE_HEADER = struct.Struct(">4sBI")
_STATE_MAGIC = b"CRNG"
_STATE_VERSION = 1

_OUTPUTS_PER_LOGIT = 2
_NUM_BITS = 53
_MOST_DRAWN = 1 << 21
"""Up to this many outputs are skipped by drawing them, which takes about 4 ms; a jump would take longer."""


class QuickTopP(LogitsProcessor):
    """A top-p filter that keeps the tokens and scores that `TopPLogitsWarper` keeps with 0 < `top_p` < 1, bit for bit.

    The filter of `transformers` sorts scores with their indices. For 49152 tokens, that takes 3 ms for each row on a
    CPU, a third of the time of the head. Sorting the scores alone is thirty times as fast, and tells which tokens stay.
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p
        self._exact = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Filters `scores`, float32 `[1, V]` on the CPU; those of removed tokens become minus Inf.

        `input_ids`, int64 `[1, T]`, have no effect.
        """
        ascending = torch.from_numpy(np.sort(scores.numpy()))
        # These are the sums that `transformers` forms, in its order, since their rounding decides about the last token.
        is_removed = (ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - self._top_p)[0]
        is_removed[-1] = False
        num_removed = int(is_removed.sum())
        is_kept = scores >= ascending[0, num_removed]
        # Sums grow, so the removed tokens come first. Among equal scores, the sort order of `transformers` decides.
        if int(is_kept.sum()) == len(is_removed) - num_removed:
            return scores.masked_fill(~is_kept, -torch.inf)
        return cast(Tensor, self._exact(input_ids, scores))


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers that a device has drawn for several samplers, one choice of each.

    Attributes:
        numbers: float32 `[R, V]` on the device.
        moved: waits for the device, and returns where each stream is since then, as `random_jump.words_of` has it.
    """

    numbers: Tensor
    moved: Callable[[], Sequence[tuple[Words, int]]]


class Sampler:
    """Chooses the tokens of one sequence, and keeps the state that the next choice depends on.

    With a seed, the tokens equal those of `generate(do_sample=True, ...)` after `torch.manual_seed(seed)` on the CPU
    in float32: the sampler has the same processors in the same order, and its own generator with the same stream.

    Args:
        prompt_ids: the tokens before the answer; only penalties use them.
        generated_ids: tokens of the answer that another sampler chose already.
        num_skipped: how many choices other samplers made with the same seed; the random stream continues after them.
        state: the result of `state()`; the random stream continues from there, and `params.seed` has no effect.
        grammar: a grammar that has read `generated_ids` and that no other sampler uses; the sampler never chooses
            tokens that would break it.

    Attributes:
        num_skipped: the number of choices that the sampler has still to skip.

    Raises:
        InternalError: `state` is not a sampler's state, or has another version.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        generated_ids: Sequence[int] = (),
        num_skipped: int = 0,
        state: bytes | None = None,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        self.params = params
        self._grammar = grammar
        self._bias: Tensor | None = None
        self._past: tuple[Sequence[int], Sequence[int]] = (tuple(prompt_ids), tuple(generated_ids))
        self._penalties: TokenPenalties | None = None
        self._warpers = _warpers(params)
        self._generator: torch.Generator | None = None
        # Random numbers, or on a device other than a CPU the outputs of the generator that become these.
        self._drawn_ahead: Tensor | None = None
        # The stream's place on a device that draws from it; its row of what that has drawn for the next choice; and
        # where the stream was when the device last chose a token.
        self._slot: Slot | None = None
        self._draw_there: tuple[Draw, int] | None = None
        self._moved: tuple[Words, int] | None = None
        self.num_skipped = 0 if params.is_greedy else num_skipped
        if state is not None:
            self._generator = _decode_state(state)
        if self._generator is None and not params.is_greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    def sample(self, logits: Tensor) -> SampledToken:
        """Chooses the next token from float32 `[V]` logits on the CPU, which are not changed.

        Among equal scores, greedy choice takes the one that `torch.argmax` takes.

        Raises:
            NonFiniteOutput: the logits have a NaN or Inf, or all are minus Inf.
            InvalidRequest: the grammar has become too complex.
        """
        if logits.dim() != 1 or logits.dtype != torch.float32:
            raise InternalError("The sampler takes one row of float32 logits.")
        with torch.inference_mode():
            scores = self.scores(logits)
            token_id = self._greedy(scores) if self.params.is_greedy else self._drawn(scores)
            self.add(token_id)
            return self.with_logprobs(token_id, logits)

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are chosen by other scores than the model's own."""
        return self.has_grammar or self.params.has_penalties or bool(self.params.logit_bias)

    @property
    def has_grammar(self) -> bool:
        """True if a grammar bars tokens."""
        return self._grammar is not None

    def scores(self, logits: Tensor) -> Tensor:
        """The scores, float32 `[V]`, by which the next token is chosen, on the device of `logits`, float32 `[V]`.

        Biases come first, then penalties, then the grammar, which bars tokens. The caller has entered inference mode.

        Raises:
            InvalidRequest: the grammar has become too complex.
        """
        scores = logits
        if self.params.logit_bias:
            scores = scores + self.biases(logits.shape[0], logits.device)
        if self.params.has_penalties:
            scores = self.penalties(logits.shape[0]).apply(scores)
        if (allowed := self.allowed()) is not None:
            scores = scores + barred([allowed], logits.shape[0], logits.device)[0]
        return scores

    def allowed(self) -> bytes | None:
        """Returns a bit for each token: 1 if the grammar allows the token next. Returns None if there is no grammar.

        Raises:
            InvalidRequest: the grammar has become too complex.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def biases(self, num_logits: int, device: torch.device) -> Tensor:
        """The bias of each token, float32 `[V]` on `device`."""
        # A fork may read logits of another device, such as those of a draft model.
        if self._bias is None or self._bias.device != device:
            bias = torch.zeros(num_logits)
            token_ids, biases = zip(*self.params.logit_bias, strict=True)
            bias[list(token_ids)] = torch.tensor(biases)
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

    def add(self, token_id: int) -> None:
        """Advances penalties and grammar by the chosen token. The caller has entered inference mode."""
        if self._penalties is not None:
            self._penalties.add(token_id)
        self.follow(token_id)

    def follow(self, token_id: int) -> None:
        """Advances the grammar by the chosen token, which `StackedPenalties.add` counts."""
        if self._grammar is not None:
            self._grammar.add(token_id)

    def bar_ahead(self) -> None:
        """Computes which tokens the grammar allows next, before the logits are there. Any thread may call this.

        Raises:
            InvalidRequest: the grammar has become too complex; the next choice raises the same.
        """
        if self._grammar is not None:
            self._grammar.allowed()

    def draw_ahead(self, num_logits: int, device: torch.device, *, like_gpu: bool | None = None) -> None:
        """Draws the random numbers of the next choice before its logits are there, and begins to copy them to `device`.

        Any thread may call this, but no other thread may use the sampler meanwhile. `await_copies` comes before the
        choice.

        Args:
            like_gpu: see `sample_together`; None: only if `device` is not a CPU.
        """
        like_gpu = device.type != "cpu" if like_gpu is None else like_gpu
        if self._drawn_ahead is None and self._draw_there is None and not self.params.is_greedy:
            # What is drawn is stored before it is moved: if it were lost, every later token would change.
            self._drawn_ahead = self._draw_outputs(num_logits, device) if like_gpu else self._draw(num_logits)
            if self._drawn_ahead.device != device:
                self._drawn_ahead = begin_copy(self._drawn_ahead, device)

    def random_numbers(self, num_logits: int, device: torch.device) -> Tensor:
        """The random numbers of the next choice, float32 `[V]` on `device`; each call returns new ones.

        The token with the largest quotient of probability and number is the one that `torch.multinomial` chooses.
        """
        if self._draw_there is not None:
            draw, index = self._draw_there
            self.use_draw()
            return draw.numbers[index].to(device)
        drawn, self._drawn_ahead = self._drawn_ahead, None
        if drawn is None:
            drawn = self._draw(num_logits)
        return to_device(drawn if drawn.is_floating_point() else exponential_numbers(drawn), device, torch.float32)

    def random_outputs(self, num_logits: int, device: torch.device) -> Tensor:
        """The outputs of the generator for the next choice, int64 `[V]` on `device`; each call returns new ones.

        `exponential_numbers` of them are the numbers that `random_numbers` would return. On a CPU, torch takes six
        times as long to compute these numbers as to draw the outputs.
        """
        drawn, self._drawn_ahead = self._drawn_ahead, None
        return to_device(self._draw_outputs(num_logits, device) if drawn is None else drawn, device, torch.int64)

    def skip(self, num_logits: int) -> None:
        """Skips the random numbers that other samplers drew; if nothing calls this before, the first choice does.

        The size of a draw depends only on the vocabulary: `torch.multinomial` takes 64 bits for each logit. Skipping
        takes about ten milliseconds, whatever the number of choices.
        """
        self._take_back()
        num_outputs = _OUTPUTS_PER_LOGIT * num_logits * self.num_skipped
        if self._generator is not None and num_outputs > _MOST_DRAWN:
            self._generator.set_state(_tensor_of(moved_on(self._stream_state(), num_outputs)))
        elif num_outputs:
            torch.empty(num_outputs // _OUTPUTS_PER_LOGIT, dtype=torch.int64).random_(generator=self._generator)
        self.num_skipped = 0

    def fork(self) -> "Sampler":
        """An independent sampler that chooses the same next tokens as this one, without log probabilities."""
        copied = copy.copy(self)
        copied.params = replace(self.params, num_logprobs=None)
        if self._penalties is not None:
            copied._penalties = self._penalties.copy()
        if self._grammar is not None:
            copied._grammar = self._grammar.fork()
        if self._generator is not None:
            copied._generator = torch.Generator().set_state(_tensor_of(self._stream_state()))
            copied._slot = copied._moved = None
        return copied

    def stream(self, begin: Callable[[bytes], Slot], num_logits: int) -> Slot | None:
        """The place of the random stream on a device, which draws the next numbers from it.

        Args:
            begin: copies a stream, by the state of its generator, to the device.

        Returns:
            None if the next numbers are drawn already, or none are needed.
        """
        if self._drawn_ahead is not None or self._draw_there is not None or self._generator is None:
            return None
        if self._slot is None:
            if self.num_skipped:
                self.skip(num_logits)
            self._slot = begin(self._stream_state())
        return self._slot

    def take_draw(self, draw: Draw, index: int) -> None:
        """Keeps the numbers that the device has drawn for the next choice, in the row `index`."""
        self._draw_there = draw, index

    @property
    def draw_there(self) -> tuple[Draw, int] | None:
        """What `take_draw` got for the next choice."""
        return self._draw_there

    def use_draw(self) -> None:
        """Notes that the next choice has taken its numbers. The call waits for the device."""
        if self._draw_there is not None:
            draw, index = self._draw_there
            self._moved, self._draw_there = draw.moved()[index], None

    def _stream_state(self) -> bytes:
        generator = cast(torch.Generator, self._generator)
        state = generator.get_state().numpy().tobytes()
        return state if self._moved is None else with_words(state, *self._moved)

    def _take_back(self) -> None:
        """Moves the generator to where a device has moved the stream, which then draws from it no more."""
        if self._moved is not None and self._generator is not None:
            self._generator.set_state(_tensor_of(self._stream_state()))
        self._slot = self._moved = None

    def state(self) -> bytes:
        """The state of the random stream: 9 bytes for a greedy sampler, else about 5 KB, without text or tokens."""
        stream = b"" if self._generator is None else self._stream_state()
        return _STATE_HEADER.pack(_STATE_MAGIC, _STATE_VERSION, len(stream)) + stream

    def _greedy(self, scores: Tensor) -> int:
        token_id = int(scores.argmax())
        # `argmax` takes a NaN for the largest number, so a check of the winner finds any NaN.
        if not math.isfinite(scores[token_id].item()):
            raise NonFiniteOutput("The model's output is not finite.")
        return token_id

    def _drawn(self, scores: Tensor) -> int:
        if not math.isfinite(scores.max().item()):
            raise NonFiniteOutput("The model's output is not finite.")
        rows = scores.unsqueeze(0)
        for warper in self._warpers:
            rows = warper(_NO_IDS, rows)
        numbers = self.random_numbers(scores.shape[0], scores.device)
        return int((rows.softmax(dim=-1)[0] / numbers).argmax())

    def _draw(self, num_logits: int) -> Tensor:
        numbers = torch.empty(num_logits)
        self._take_back()
        if self.num_skipped:
            self.skip(num_logits)
        return numbers.exponential_(generator=self._generator)

    def _draw_outputs(self, num_logits: int, device: torch.device) -> Tensor:
        outputs = empty_to_copy(num_logits, torch.int64, device)
        self._take_back()
        if self.num_skipped:
            self.skip(num_logits)
        return outputs.random_(generator=self._generator)

    def with_logprobs(self, token_id: int, logits: Tensor) -> SampledToken:
        """The token with the log probabilities that `params` ask for, from the model's logits.

        `logits` are float32 `[V]`, on any device.
        """
        if self.params.num_logprobs is None:
            return SampledToken(token_id)
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(min(self.params.num_logprobs, logits.shape[0]))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return SampledToken(token_id, float(logprobs[token_id]), tuple(pairs))


def exponential_numbers(outputs: Tensor) -> Tensor:
    """The exponentially distributed numbers that torch makes on a CPU of a generator's outputs.

    Args:
        outputs: int64 of any shape, on any device, as `Tensor.random_` draws them.

    Returns:
        float32 of the same shape and device. The logarithm is computed in float64, so that devices whose last bit
        differs there give the same float32, except for about one number in 2 to the power of 28.
    """
    return exponential_of((outputs & ((1 << _NUM_BITS) - 1)).double() / -(1 << _NUM_BITS))


def exponential_of(negated: Tensor) -> Tensor:
    """The exponentially distributed numbers, float32, of evenly drawn numbers between -1 and 0.

    `negated` are float64 of any shape, on any device.
    """
    return torch.log1p(negated).neg().float()


def _tensor_of(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


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
    return torch.zeros(256, 8).masked_fill(bits == 0, -torch.inf).to(device)


_NO_IDS = torch.empty((1, 0), dtype=torch.int64)
"""Token ids for the warpers, which take them but do not read them."""


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
        generator.set_state(_tensor_of(stream))
    except RuntimeError as error:
        raise unreadable from error
    return generator
