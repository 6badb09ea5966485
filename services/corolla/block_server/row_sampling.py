"""Turns the last block's outputs into tokens: applies the head and chooses tokens for all rows of an iteration."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from corolla.block_server.grammars import Grammars
from corolla.chassis.errors import CorollaError, InvalidRequest, MalformedMessage, NonFiniteOutput
from corolla.chassis.handlers import call_path
from corolla.compute.device_memory import most_logit_rows
from corolla.decoding.draft_model import DraftModel
from corolla.decoding.parameters import SampledToken, SamplingParams
from corolla.decoding.sampling import Sampler, launch_choice
from corolla.decoding.speculation import MAX_DRAFT_TOKENS
from corolla.decoding.speculator import MtpDrafter, Speculator, make_speculator
from corolla.models.edges import Edges
from corolla.models.mtp import MtpParts
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.device_copies import Reading, picked, with_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedBySamplers:
    """The draft model, or the model's own block that drafts, and the grammars that all samplers of a server share."""

    draft_model: DraftModel | MtpParts | None = None
    grammars: Grammars | None = None


NOTHING_SHARED: Final = SharedBySamplers()


@dataclass(eq=False, repr=False)
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

    sampler: Sampler
    speculator: Speculator | None
    vocab_size: int
    num_tokens_left: int
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        params = self.sampler.params
        self.takes_likeliest = params.is_greedy and not self.sampler.adjusts_logits and params.num_logprobs is None

    @classmethod
    def read(
        cls,
        message: pb.Sampler,
        draft_model: DraftModel | MtpParts | None,
        *,
        vocab_size: int,
        max_tokens: int,
        grammars: Grammars | None = None,
    ) -> Self:
        """Makes a sampler from the message of an Open.

        Args:
            max_tokens: the most tokens of the session.
            grammars: the grammars of this server; None if it follows no grammars.

        Raises:
            MalformedMessage: a parameter is out of range, or the text has unknown ids or breaks its grammar.
            InternalError: grammars cannot be followed here.
        """
        _check(message, vocab_size, max_tokens)
        text = list(message.token_ids)
        generated_ids = text[message.num_prompt_tokens :]
        grammar = None
        if message.HasField("grammar"):
            if grammars is None:
                raise MalformedMessage("sampler.grammar", "is not supported by this server")
            grammar = grammars.begin(message.grammar.text, generated_ids)
        try:
            num_logprobs = message.num_logprobs if message.HasField("num_logprobs") else None
            params = SamplingParams.read(message.parameters, vocab_size, num_logprobs, message.seed)
            sampler = Sampler(
                params,
                text[: message.num_prompt_tokens] if params.has_penalties else (),
                generated_ids=generated_ids if params.has_penalties else (),
                position=message.position,
                grammar=grammar,
            )
        except InvalidRequest as failure:
            raise MalformedMessage("sampler", failure.message) from None
        speculator = make_speculator(message, draft_model, grammar)
        return cls(sampler, speculator, vocab_size, message.num_tokens_left, frozenset(message.end_token_ids))

    @property
    def mtp_drafter(self) -> MtpDrafter | None:
        """The drafter of the model's own block; None: the block drafts nothing for this session."""
        return None if self.speculator is None else self.speculator.mtp

    @property
    def runs_model(self) -> bool:
        """A model drafts for this session, and takes long for it."""
        return self.speculator is not None and self.speculator.runs_model

    def take(self, row: pb.SampledRow, token: SampledToken, draft_ids: Sequence[int]) -> bool:
        """Adds the next token to a row. Returns whether the step has also computed the logits of the token after it.

        No token is taken after the first one that differs from its draft token or ends the answer.

        Args:
            draft_ids: the draft tokens that the step checked.
        """
        index = len(row.tokens)
        _add(token, row)
        self.sampler.take(token.token_id)
        self.num_tokens_left -= 1
        if self.num_tokens_left <= 0 or token.token_id in self.end_token_ids:
            row.is_last = True
            return False
        return index < len(draft_ids) and token.token_id == draft_ids[index]

    def begin_draft(self, row: pb.SampledRow, draft_ids: Sequence[int]) -> int:
        """Returns how many tokens to draft after a row that has all its tokens; 0 at the end of an answer.

        Args:
            draft_ids: the draft tokens that the step checked.
        """
        token_ids = [token.token_id for token in row.tokens]
        if self.speculator is None or row.is_last:
            if self.speculator is not None and self.speculator.mtp is not None:
                self.speculator.mtp.extend(token_ids)
            return 0
        try:
            self.speculator.observe(len(draft_ids), len(token_ids) - 1)
            return self.speculator.begin(token_ids, self.num_tokens_left)
        except Exception as failure:
            self.stop_drafting(failure)
            return 0

    def drafted(self, num_tokens: int) -> Sequence[int]:
        """Drafts at most so many tokens after those of `begin_draft`."""
        if self.speculator is None:
            return ()
        try:
            return self.speculator.draft(num_tokens, self.sampler)
        except Exception as failure:
            self.stop_drafting(failure)
            return ()

    def stop_drafting(self, failure: Exception) -> None:
        """Lets the answer continue without drafts, since what drafts them failed, for lack of memory, say."""
        # The chosen tokens are right.
        log.error("drafting failed; an answer continues without draft tokens", extra={"where": call_path(failure)})
        self.speculator = None


def _check(message: pb.Sampler, vocab_size: int, max_tokens: int) -> None:
    drafts = message.drafts
    text = message.token_ids
    if len(text) > max_tokens or message.num_prompt_tokens > len(text):
        raise MalformedMessage("sampler", "has more tokens than the session reserves")
    if message.position > max_tokens:
        raise MalformedMessage("sampler.position", "must not be behind the tokens that the session reserves")
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


class PredictedRow(NamedTuple):
    """A row with the tokens that were chosen for it, and how many may be drafted after them."""

    row: SamplingRow
    sampled: pb.SampledRow
    num_drafts: int


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
            token_ids = with_rows(self.likeliest_ids, slow, token_ids)
        return replace(self, slow=slow, finish_slow=choice.finish), token_ids

    def with_failed_choices(self, samplers: Sequence[SessionSampler], error: CorollaError) -> "RowLogits":
        """Logits whose `slow` tokens could not be chosen; see `with_choices`."""
        slow = _slow(samplers)
        return replace(self, slow=slow, finish_slow=lambda: [error] * len(slow))


def _slow(samplers: Sequence[SessionSampler]) -> list[int]:
    return [index for index, sampler in enumerate(samplers) if not sampler.takes_likeliest]


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
    logits: RowLogits | None = None,
    predict: Callable[[Sequence[PredictedRow]], None] | None = None,
) -> list[ChosenTokens | CorollaError]:
    """Chooses tokens for all rows, and drafts the next ones. A row that fails does not affect others.

    Args:
        error_of: makes the error for the client of a failed row.
        logits: the logits of the rows; None: they are computed.
        predict: lets the model's own block draft for the rows that have tokens; None: there is no such block.

    Returns:
        One entry for each row, in order.
    """
    taken = _taken(edges, rows, error_of, logits)
    predicted = [
        PredictedRow(each, message, each.sampler.begin_draft(message, each.draft_ids))
        for each, message in zip(rows, taken, strict=True)
        if isinstance(message, pb.SampledRow)
    ]
    if predict is not None:
        predict(predicted)
    chosen = iter([ChosenTokens(each.sampled, each.row.sampler.drafted(each.num_drafts)) for each in predicted])
    return [message if isinstance(message, CorollaError) else next(chosen) for message in taken]


def _taken(
    edges: Edges, rows: Sequence[SamplingRow], error_of: Callable[[Exception], CorollaError], logits: RowLogits | None
) -> list[pb.SampledRow | CorollaError]:
    """The tokens of all rows; see `sample_rows`."""
    computed = logits_of(edges, rows, Reading()) if logits is None else logits
    starts = [0, *accumulate(each.num_choices for each in rows)]
    likeliest = None if computed.read_likeliest is None else computed.read_likeliest().tolist()
    slow = [index for index, each in enumerate(rows) if not each.sampler.takes_likeliest]
    chosen = _chosen_together([rows[index] for index in slow], [starts[index] for index in slow], computed, error_of)
    elsewhere = dict(zip(slow, chosen, strict=True))

    def outcome(index: int) -> pb.SampledRow | CorollaError:
        if likeliest is None or index in elsewhere:
            return elsewhere[index]
        each, own = rows[index], range(starts[index], starts[index + 1])
        message = pb.SampledRow()
        for at in own:
            # `max` treats NaN as the largest number, so the score is NaN if any logit is.
            if not math.isfinite(likeliest[1][at]):
                return error_of(NonFiniteOutput("The model's output is not finite."))
            if not each.sampler.take(message, SampledToken(int(likeliest[0][at])), each.draft_ids):
                break
        return message

    return [outcome(index) for index in range(len(rows))]


def _chosen_together(
    rows: Sequence[SamplingRow],
    starts: Sequence[int],
    computed: RowLogits,
    error_of: Callable[[Exception], CorollaError],
) -> list[pb.SampledRow | CorollaError]:
    """Chooses the tokens of all rows at once. Rows whose choices look back get their further tokens one after another.

    A row goes on while its draft tokens are right and its answer has not ended.

    Args:
        starts: the index of each row's first logits.
        computed: the logits of these rows, and of others. If it has chosen tokens, they are those of these rows.
    """
    messages = [pb.SampledRow() for _ in rows]
    failures: dict[int, CorollaError] = {}
    going = list(range(len(rows)))
    finish = computed.finish_slow if computed.slow else None
    while going:
        places = [(index, number) for index in going for number in _choosable(rows[index], len(messages[index].tokens))]
        if finish is None:
            samplers = [rows[index].sampler.sampler for index, _ in places]
            logits = picked(computed.logits, tuple(starts[index] + number for index, number in places))
            finish = launch_choice(
                samplers, logits, [number - len(messages[index].tokens) for index, number in places]
            ).finish
        goes_on = dict.fromkeys(going, True)
        for (index, _), token in zip(places, finish(), strict=True):
            if not goes_on[index]:
                continue
            if isinstance(token, CorollaError):
                failures[index], goes_on[index] = error_of(token), False
            else:
                goes_on[index] = rows[index].sampler.take(messages[index], token, rows[index].draft_ids)
        going, finish = [index for index in going if goes_on[index]], None

    return [failures.get(index) or message for index, message in enumerate(messages)]


def _choosable(row: SamplingRow, num_taken: int) -> Iterable[int]:
    """The numbers of the row's tokens that can be chosen together, once it has taken so many."""
    return (num_taken,) if row.sampler.sampler.looks_back else range(num_taken, row.num_choices)


def _add(token: SampledToken, row: pb.SampledRow) -> None:
    if not token.top_logprobs:
        row.tokens.add(token_id=token.token_id, logprob=token.logprob)
        return
    token_ids, logprobs = zip(*token.top_logprobs, strict=True)
    row.tokens.add(token_id=token.token_id, logprob=token.logprob, top_token_ids=token_ids, top_logprobs=logprobs)
