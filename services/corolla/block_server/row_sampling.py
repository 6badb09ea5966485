"""Turns the last block's outputs into tokens: applies the head and chooses tokens for all rows of an iteration."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from corolla.block_server.grammars import Grammars
from corolla.chassis.errors import CorollaError, InternalError, InvalidRequest, MalformedMessage, NonFiniteOutput
from corolla.chassis.handlers import call_path
from corolla.compute.device_memory import most_logit_rows
from corolla.decoding.batched_sampling import launch_choice, sample_together
from corolla.decoding.draft_model import DraftModel
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.random_streams import streams_of
from corolla.decoding.sampling import Sampler
from corolla.decoding.speculation import MAX_DRAFT_TOKENS
from corolla.decoding.speculator import Speculator, make_speculator
from corolla.models.edges import Edges
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import Reading, on_device

log = logging.getLogger(__name__)

_EXTRA_DRAWS: Final = 128
"""How many choices may be skipped beyond the session's tokens, since a stop string may discard chosen tokens."""

_NUM_DRAWS_PER_STATE: Final = 16
"""After so many choices the client gets the random stream's state, of 5 KB, so that a new sampler has fewer to skip."""


@dataclass(frozen=True, slots=True)
class SharedBySamplers:
    """The draft model and the grammars that all samplers of a server share, if it has them."""

    draft_model: DraftModel | None = None
    grammars: Grammars | None = None


NOTHING_SHARED: Final = SharedBySamplers()


class SessionSampler:
    """Chooses the tokens of one session on its last hop, and drafts what may follow.

    A sampler lives as long as the session is open in one epoch. Each open brings the data for a new sampler.

    Args:
        num_tokens_left: how many tokens the answer may still have.
        end_token_ids: the tokens that end the answer.

    Attributes:
        vocab_size: how many logits there are for each token.
        sampler: chooses a token from logits.
        takes_likeliest: whether the most probable token is always chosen and nothing else is needed.
    """

    def __init__(
        self,
        sampler: Sampler,
        speculator: Speculator | None,
        vocab_size: int,
        num_tokens_left: int,
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.vocab_size = vocab_size
        self._num_tokens_left = num_tokens_left
        self._end_token_ids = end_token_ids
        self.sampler = sampler
        self._speculator = speculator
        self._num_draws_since_state = _NUM_DRAWS_PER_STATE
        params = sampler.params
        self.takes_likeliest = params.is_greedy and not sampler.adjusts_logits and params.num_logprobs is None

    @classmethod
    def read(
        cls,
        message: pb.Sampler,
        draft_model: DraftModel | None,
        *,
        vocab_size: int,
        max_tokens: int,
        grammars: Grammars | None = None,
        may_read_grammar: bool = True,
    ) -> Self:
        """Makes a sampler from the message of an Open.

        Args:
            max_tokens: the most tokens of the session.
            grammars: the grammars of this server; None if it follows no grammars.
            may_read_grammar: whether to read a grammar that this server does not have, which may take long.

        Raises:
            MalformedMessage: a parameter is out of range, or the text has unknown ids or breaks its grammar.
            InternalError: grammars cannot be followed here.
            GrammarNotRead: this server does not have the grammar, and must not read it now.
        """
        _check(message, vocab_size, max_tokens)
        text = list(message.token_ids)
        generated_ids = text[message.num_prompt_tokens :]
        grammar = None
        if message.HasField("grammar"):
            if grammars is None:
                raise MalformedMessage("sampler.grammar", "is not supported by this server")
            grammar = grammars.begin(message.grammar.text, generated_ids, may_read=may_read_grammar)
        try:
            num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
            params = SamplingParams.read(message.parameters, vocab_size, num_logprobs, message.seed)
            sampler = Sampler(
                params,
                text[: message.num_prompt_tokens] if params.has_penalties else (),
                generated_ids=generated_ids if params.has_penalties else (),
                num_skipped=message.num_skipped,
                state=message.state or None,
                grammar=grammar,
            )
        except (InvalidRequest, InternalError) as failure:
            raise MalformedMessage("sampler", failure.message) from None
        speculator = make_speculator(message, draft_model, grammar)
        return cls(sampler, speculator, vocab_size, message.num_tokens_left, frozenset(message.end_token_ids))

    @property
    def is_independent(self) -> bool:
        """True if it has no speculator. A speculator adds draft tokens to a step, and may share its draft model."""
        return self._speculator is None

    @property
    def is_at_last(self) -> bool:
        """True if the answer ends with the next token, whichever that is."""
        return self._num_tokens_left <= 1

    def skip(self) -> None:
        """Advances the random stream past the choices that earlier samplers of the session made."""
        self.sampler.skip(self.vocab_size)

    def prepares_choice(self, device: torch.device) -> bool:
        """Returns True if a thread can prepare a choice on `device`: the CPU draws for it, or a grammar bars tokens."""
        return self.sampler.has_grammar or not (self.sampler.params.is_greedy or streams_of(device))

    def prepare_choice(self, device: torch.device) -> None:
        """Prepares the next choice before its logits exist on `device`. Any thread may call this, one at a time."""
        if streams_of(device) is None:
            self.sampler.draw_ahead(self.vocab_size, device)
        self.sampler.bar_ahead()

    @property
    def is_behind(self) -> bool:
        """Whether the speculator still has to read some of the text before it can draft."""
        return self._speculator is not None and self._speculator.is_behind

    def read_chunk(self) -> None:
        """Lets the speculator read the next chunk of the text."""
        if self._speculator is not None:
            self._speculator.read_chunk()

    def choose(
        self, num_choices: int, draft_ids: Sequence[int], choice: Callable[[int], SampledToken]
    ) -> "ChosenTokens":
        """Takes tokens up to the first one that differs from its draft token or ends the answer; drafts the next ones.

        No token is chosen after that one, so the random stream gives the same numbers as without draft tokens.

        Args:
            draft_ids: the draft tokens that the step checked, one fewer than `num_choices`.
            choice: chooses the token that follows the step's `index`-th token with a result.
        """
        row = pb.SampledRow()
        for index in range(num_choices):
            if not self.take(row, choice(index), draft_ids):
                break
        return self.chosen(row, draft_ids)

    def take(self, row: pb.SampledRow, token: SampledToken, draft_ids: Sequence[int]) -> bool:
        """Adds the next token to a row. Returns whether the step has also computed the logits of the token after it."""
        index = len(row.tokens)
        _add(token, row)
        self._num_tokens_left -= 1
        if self._num_tokens_left <= 0 or token.token_id in self._end_token_ids:
            row.is_last = True
            return False
        return index < len(draft_ids) and token.token_id == draft_ids[index]

    def chosen(self, row: pb.SampledRow, draft_ids: Sequence[int]) -> "ChosenTokens":
        """Completes a row that has all its tokens, and drafts the next tokens."""
        if not self.sampler.params.is_greedy:
            self._num_draws_since_state += len(row.tokens)
            if self._num_draws_since_state >= _NUM_DRAWS_PER_STATE:
                self._num_draws_since_state = 0
                row.state = self.sampler.state()
        drafted = () if row.is_last else self._drafted(len(draft_ids), row)
        return ChosenTokens(row, drafted)

    def _drafted(self, num_checked: int, row: pb.SampledRow) -> Sequence[int]:
        if self._speculator is None:
            return ()
        token_ids = [token.token_id for token in row.tokens]
        try:
            self._speculator.observe(num_checked, len(token_ids) - 1)
            return self._speculator.draft(token_ids, self.sampler, self._num_tokens_left)
        except Exception as failure:
            # The chosen tokens are right. The draft model may lack memory; the answer continues without drafts.
            log.error("drafting failed; an answer continues without draft tokens", extra={"where": call_path(failure)})
            self._speculator = None
            return ()


def _check(message: pb.Sampler, vocab_size: int, max_tokens: int) -> None:
    drafts = message.drafts
    text = message.token_ids
    if len(text) > max_tokens or message.num_prompt_tokens > len(text):
        raise MalformedMessage("sampler", "has more tokens than the session reserves")
    if message.num_skipped > max_tokens + _EXTRA_DRAWS:
        raise MalformedMessage("sampler", "must not skip more draws than the session has tokens")
    if max(text, default=0) >= vocab_size:
        raise MalformedMessage("sampler.token_ids", f"must be ids below {vocab_size}")
    if drafts.source and not 1 <= drafts.max_tokens <= MAX_DRAFT_TOKENS:
        raise MalformedMessage("sampler.drafts.max_tokens", f"must be from 1 to {MAX_DRAFT_TOKENS}")


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens chosen for one row and the draft tokens after them; both are empty for a row without results."""

    sampled: pb.SampledRow = field(default_factory=pb.SampledRow)
    draft_token_ids: Sequence[int] = ()


class SamplingRow(NamedTuple):
    """A row for which tokens are chosen.

    `output` is `[num_tokens, H]`, the last block's output in the model's dtype on its device.
    """

    row: pb.StepRow
    output: Tensor
    num_choices: int
    sampler: SessionSampler

    @property
    def hidden(self) -> Tensor:
        """The output for the tokens with results, `[num_choices, H]` in the model's dtype on its device."""
        return self.output[self.output.shape[0] - self.num_choices :]

    @property
    def draft_ids(self) -> Sequence[int]:
        """The draft tokens that the step checked, one fewer than the row has results."""
        num_drafted = self.num_choices - 1
        return self.row.token_ids[len(self.row.token_ids) - num_drafted :] if num_drafted else ()


def draw_ahead(samplers: Sequence[SessionSampler], device: torch.device) -> None:
    """Draws the random numbers of the samplers' next choices on `device` while it runs a step, if it can draw."""
    if samplers and (streams := streams_of(device)) is not None:
        streams.draw_ahead([each.sampler for each in samplers], samplers[0].vocab_size)


def in_parts(rows: Sequence[SamplingRow]) -> Iterator[Sequence[SamplingRow]]:
    """Splits rows, at least one, into runs whose logits are made at a time: of one row, or see `most_logit_rows`."""
    most = most_logit_rows(rows[0].sampler.vocab_size)
    start = num_choices = 0
    for index, each in enumerate(rows):
        num_choices += each.num_choices
        if num_choices > most and index > start:
            yield rows[start:index]
            start, num_choices = index, each.num_choices
    yield rows[start:]


@dataclass(frozen=True, slots=True)
class RowLogits:
    """The logits of rows, on the device of the head.

    Attributes:
        logits: float32 `[sum of num_choices, V]`.
        likeliest_ids: the most probable tokens, int64 `[sum of num_choices]`, on that device; None if no row takes
            them.
        read_likeliest: waits for the most probable tokens and their logits, and returns float64
            `[2, sum of num_choices]` on any device; None if no row takes them.
        slow: the indices of the logits from which tokens are chosen already that need more than the most probable one.
        finish_slow: waits for these tokens and returns them, or errors, once.
    """

    logits: Tensor
    likeliest_ids: Tensor | None = None
    read_likeliest: Callable[[], Tensor] | None = None
    slow: Sequence[int] = ()
    finish_slow: Callable[[], Sequence[SampledToken | CorollaError]] = tuple

    def part(self, indices: Sequence[int]) -> "RowLogits":
        """The logits at `indices`, which are in order; each occurs once."""
        if len(indices) == len(self.logits):
            return self
        ids, read, finish = self.likeliest_ids, self.read_likeliest, self.finish_slow
        places = {index: place for place, index in enumerate(indices)}
        kept = [number for number, index in enumerate(self.slow) if index in places]

        def finish_kept() -> Sequence[SampledToken | CorollaError]:
            chosen = finish()
            return [chosen[number] for number in kept]

        return RowLogits(
            picked(self.logits, indices),
            None if ids is None else picked(ids, indices),
            None if read is None else lambda: read()[:, list(indices)],
            [places[self.slow[number]] for number in kept],
            finish_kept,
        )

    def with_choices(self, samplers: Sequence[SessionSampler]) -> tuple["RowLogits", Tensor]:
        """Launches the choice of one token from each of the logits, by the sampler of the same index.

        Returns:
            Logits whose `slow` tokens are chosen, and the ids of all tokens, int64 `[samplers]` on the device.
        """
        slow = _slow(samplers)
        if not slow and self.likeliest_ids is not None:
            return self, self.likeliest_ids
        choice = launch_choice([samplers[index].sampler for index in slow], picked(self.logits, slow))
        token_ids = choice.token_ids
        if self.likeliest_ids is not None:
            at = on_device(tuple(slow), token_ids.device, torch.int64)
            token_ids = self.likeliest_ids.index_copy(0, at, token_ids)
        return replace(self, slow=slow, finish_slow=choice.finish), token_ids

    def with_failed_choices(self, samplers: Sequence[SessionSampler], error: CorollaError) -> "RowLogits":
        """Logits whose `slow` tokens could not be chosen; see `with_choices`."""
        slow = _slow(samplers)
        return replace(self, slow=slow, finish_slow=lambda: [error] * len(slow))


def _slow(samplers: Sequence[SessionSampler]) -> list[int]:
    return [index for index, sampler in enumerate(samplers) if not sampler.takes_likeliest]


def picked(every: Tensor, indices: Sequence[int]) -> Tensor:
    """The rows of `every`, `[R, ...]` in any dtype, at `indices`; makes them without waiting for the device.

    The indices are in order, and each occurs once. The result is on the same device.
    """
    return every if len(indices) == len(every) else every[on_device(tuple(indices), every.device, torch.int64)]


def logits_of(edges: Edges, rows: Sequence[SamplingRow], reading: Reading, hidden: Tensor | None = None) -> RowLogits:
    """Launches the head for all rows.

    Args:
        reading: brings the most probable tokens, if a row takes them.
        hidden: the rows' hidden states as one tensor, `[sum of num_choices, H]` in the model's dtype on its device, if
            there is one.
    """
    if hidden is None:
        parts = [each.hidden for each in rows]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
    if any(each.sampler.takes_likeliest for each in rows):
        return likeliest_of(edges, hidden, reading)
    return all_logits_of(edges, hidden)


def all_logits_of(edges: Edges, hidden: Tensor) -> RowLogits:
    """Launches the head for rows of hidden states, `[R, H]` in the model's dtype on its device."""
    return RowLogits(edges.head(hidden))


def likeliest_of(edges: Edges, hidden: Tensor, reading: Reading) -> RowLogits:
    """Launches the head for rows of hidden states, `[R, H]` in the model's dtype, and finds the most probable tokens.

    The maximum is found on the device, so that only ids and scores are copied from there, by `reading`.
    """
    logits = edges.head(hidden)
    best = logits.max(dim=-1)
    found = torch.stack((best.indices.double(), best.values.double()))
    return RowLogits(logits, best.indices, reading.add(found))


def sample_rows(
    edges: Edges,
    rows: Sequence[SamplingRow],
    error_of: Callable[[Exception], CorollaError],
    threads: Executor | None = None,
    *,
    is_batched: bool = False,
    logits: RowLogits | None = None,
) -> list[ChosenTokens | CorollaError]:
    """Chooses tokens for all rows, and returns one entry for each, in order. A row that fails does not affect others.

    Args:
        error_of: makes the error for the client of a failed row.
        threads: choose the tokens of rows that need more than the most probable one; None: the calling thread.
        is_batched: whether to choose the tokens of these rows in batches instead, on the device of the head.
        logits: the logits of the rows; None: they are computed.
    """
    computed = logits_of(edges, rows, Reading()) if logits is None else logits
    all_logits, likeliest, scores = computed.logits, None, None
    if computed.read_likeliest is not None:
        ids, scores = computed.read_likeliest().tolist()
        likeliest = list(map(int, ids))
    slow = [index for index, each in enumerate(rows) if not each.sampler.takes_likeliest]
    if slow and not is_batched:
        all_logits = all_logits.cpu()
    ends = list(accumulate(each.num_choices for each in rows))

    def chosen(index: int) -> ChosenTokens | CorollaError:
        sampler, end = rows[index].sampler, ends[index]
        num_choices = rows[index].num_choices
        start = end - num_choices
        try:
            if sampler.takes_likeliest and likeliest is not None and scores is not None:
                choice = _likeliest(likeliest[start:end], scores[start:end])
            else:
                choice = _sampled(sampler.sampler, all_logits[start:end])
            return sampler.choose(num_choices, rows[index].draft_ids, choice)
        except Exception as failure:
            return error_of(failure)

    elsewhere: dict[int, ChosenTokens | CorollaError] = {}
    if is_batched:
        starts = [ends[index] - rows[index].num_choices for index in slow]
        batched = _chosen_in_batches([rows[index] for index in slow], starts, computed, error_of)
        elsewhere = dict(zip(slow, batched, strict=True))
    elif threads is not None and len(independent := [each for each in slow if rows[each].sampler.is_independent]) > 1:
        # Threads help, since torch releases the interpreter's lock while it computes.
        elsewhere = dict(zip(independent, threads.map(chosen, independent), strict=True))
    return [elsewhere[index] if index in elsewhere else chosen(index) for index in range(len(rows))]


def _chosen_in_batches(
    rows: Sequence[SamplingRow],
    starts: Sequence[int],
    computed: RowLogits,
    error_of: Callable[[Exception], CorollaError],
) -> list[ChosenTokens | CorollaError]:
    """Chooses the first tokens of all rows in one batch, then the second tokens of the rows that go on, and so forth.

    A row goes on while its draft tokens are right and its answer has not ended.

    Args:
        starts: the index of each row's first logits.
        computed: the logits of these rows, and of others. If it has chosen tokens, they are those of these rows.
    """
    logits = computed.logits
    messages = [pb.SampledRow() for _ in rows]
    failures: dict[int, CorollaError] = {}
    going = list(range(len(rows)))
    while going:
        at = tuple(starts[index] + len(messages[index].tokens) for index in going)
        if len(computed.slow) == len(going) and not any(message.tokens for message in messages):
            tokens = list(computed.finish_slow())
        else:
            tokens = sample_together([rows[index].sampler.sampler for index in going], picked(logits, at))
        going, before = [], going
        for index, token in zip(before, tokens, strict=True):
            if isinstance(token, CorollaError):
                failures[index] = error_of(token)
            elif rows[index].sampler.take(messages[index], token, rows[index].draft_ids):
                going.append(index)

    def outcome(index: int) -> ChosenTokens | CorollaError:
        return failures.get(index) or rows[index].sampler.chosen(messages[index], rows[index].draft_ids)

    return [outcome(index) for index in range(len(rows))]


def _likeliest(token_ids: Sequence[int], scores: Sequence[float]) -> Callable[[int], SampledToken]:
    def choice(index: int) -> SampledToken:
        # `max` treats NaN as the largest number, so the score is NaN if any logit is.
        if not math.isfinite(scores[index]):
            raise NonFiniteOutput("The model's output is not finite.")
        return SampledToken(token_ids[index])

    return choice


def _sampled(sampler: Sampler, logits: Tensor) -> Callable[[int], SampledToken]:
    return lambda index: sampler.sample(logits[index])


def _add(token: SampledToken, row: pb.SampledRow) -> None:
    if not token.top_logprobs:
        row.tokens.add(token_id=token.token_id, logprob=token.logprob)
        return
    token_ids, logprobs = zip(*token.top_logprobs, strict=True)
    row.tokens.add(token_id=token.token_id, logprob=token.logprob, top_token_ids=token_ids, top_logprobs=logprobs)
