"""Speculation within one answer, on the hop that chooses its tokens: the drafters, and the choice of draft lengths."""

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from corolla.chassis.errors import CorollaError, NonFiniteOutput
from corolla.decoding.draft_model import DRAFT_MODEL_RATES, DraftModel, DraftReading
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.prompt_lookup import LOOKUP_RATES, PromptLookup
from corolla.decoding.sampling import Sampler, sample_together
from corolla.decoding.speculation import DraftLength
from corolla.models.mtp import MTP_RATES, MtpParts
from corolla.v1 import blocks_pb2 as pb

_FORCED_RATE: Final = 0.95
"""The expected share of right tokens among those that a grammar forces: other tokens may spell the same text."""


class Drafter(Protocol):
    """Follows a text and drafts its next tokens. It reads the text in short chunks."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the next tokens of the text."""

    def catch_up(self) -> bool:
        """Reads the next chunk. Returns whether the whole text is read, so that something can be drafted."""

    @property
    def evidence(self) -> int | None:
        """The kind of evidence for a draft now; None if there is nothing to draft from."""

    def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        """Drafts at most `num_tokens` tokens. The sampler is the answer's own, and is not changed."""


class Speculator:
    """Drafts for one answer with the answer's own sampler, and learns from each of its steps. Its methods block.

    Attributes:
        mtp: the drafts of the model's own block, which are made between `begin` and `draft`; None: other drafts.
        runs_model: whether a model drafts, so that drafts take long.
    """

    def __init__(
        self, drafter: Drafter, length: DraftLength, mtp: "MtpDrafter | None" = None, *, runs_model: bool
    ) -> None:
        self.mtp, self.runs_model = mtp, runs_model
        self._drafter = drafter
        self._length = length
        self._evidence: int | None = None
        self._step_began_s: float | None = None

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learns from a step that checked `num_drafted` draft tokens, except from the answer's first step."""
        if self._step_began_s is not None:
            self._length.observe(self._evidence, num_drafted, num_accepted, time.monotonic() - self._step_began_s)

    def begin(self, token_ids: Sequence[int], num_tokens_left: int) -> int:
        """Takes `token_ids`, which the sampler chose since the last call. Returns how many tokens to draft after them.

        Args:
            num_tokens_left: how many tokens the answer may still have after these.
        """
        self._step_began_s = time.monotonic()
        self._evidence = None
        self._drafter.extend(token_ids)
        if not self._drafter.catch_up():
            return 0
        self._evidence = self._drafter.evidence
        if self._evidence is None:
            return 0
        # The answer's last token needs no step, so a draft token at it is of no use.
        return self._length.choose(self._evidence, max(0, num_tokens_left - 1))

    def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        """Drafts at most `num_tokens` tokens after those that `begin` took."""
        if num_tokens == 0:
            return []
        try:
            return self._drafter.draft(num_tokens, sampler)
        except NonFiniteOutput:
            return []  # the draft model's output is not finite; the served model chooses without drafts


def make_speculator(
    message: pb.Sampler, draft_model: DraftModel | MtpParts | None, grammar: AnswerGrammar | None = None
) -> Speculator | None:
    """The speculator that a session's sampler asks for; None without drafts, or if the draft model is missing.

    Args:
        draft_model: the draft model of this server, or the block of the model itself that drafts in its place.
        grammar: the grammar of the session's sampler.
    """
    drafts = message.drafts
    drafter: Drafter
    mtp: MtpDrafter | None = None
    rates: tuple[float, ...]
    if drafts.source == pb.Drafts.SOURCE_PROMPT_LOOKUP:
        drafter, rates = PromptLookup(), LOOKUP_RATES
    elif drafts.source == pb.Drafts.SOURCE_DRAFT_MODEL and isinstance(draft_model, DraftModel):
        drafter, rates = ModelDrafter(draft_model), DRAFT_MODEL_RATES
    elif drafts.source == pb.Drafts.SOURCE_DRAFT_MODEL and draft_model is not None:
        drafter = mtp = MtpDrafter()
        rates = MTP_RATES
    else:
        return None
    if grammar is not None:
        drafter, rates = GrammarDrafter(drafter, grammar), (_FORCED_RATE, *rates)
    drafter.extend(message.token_ids)
    length = DraftLength(drafts.max_tokens, rates, is_adaptive=drafts.is_adaptive)
    return Speculator(drafter, length, mtp, runs_model=drafts.source == pb.Drafts.SOURCE_DRAFT_MODEL)


class ModelDrafter:
    """Drafts with the draft model.

    A fork of the answer's sampler, penalties included, chooses the draft tokens. With equal random numbers, two similar
    distributions mostly give the same token, so drafts of sampled answers are accepted, too.
    """

    def __init__(self, model: DraftModel) -> None:
        self._reading = DraftReading(model)

    def extend(self, token_ids: Iterable[int]) -> None:
        self._reading.token_ids.extend(token_ids)
        self._reading.forget_rejected_tokens()

    def catch_up(self) -> bool:
        self._reading.read_chunk()
        return not self._reading.is_behind

    @property
    def evidence(self) -> int | None:
        return 0 if self._reading.num_tokens_left else None

    def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        """Drafts with the draft model; see `Drafter.draft`."""
        fork = sampler.fork()
        drafted: list[int] = []
        newest = self._reading.token_ids[-1]
        for _ in range(min(num_tokens, self._reading.num_tokens_left)):
            (token,) = sample_together([fork], self._reading.logits_after(newest).unsqueeze(0))
            if isinstance(token, CorollaError):
                raise token
            newest = token.token_id
            drafted.append(newest)
        return drafted


class MtpDrafter:
    """Hands over what the multi-token prediction block has drafted, for all sessions of a step at once.

    Attributes:
        token_ids: the text so far.
        drafted: the tokens that the block drafts next.
    """

    evidence = 0

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.drafted: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        self.token_ids.extend(token_ids)
        self.drafted = []

    def catch_up(self) -> bool:
        """Nothing is left to read: the block reads each token of the text in the step that computes it."""
        return True

    def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        return self.drafted[:num_tokens]


class GrammarDrafter:
    """Drafts the tokens that a grammar forces; else those tokens of another drafter that the grammar allows.

    The served model checks forced tokens like all draft tokens, since other tokens may spell the same text.

    Args:
        grammar: the answer's grammar, which must have read all tokens of the answer before each draft.
    """

    def __init__(self, drafter: Drafter, grammar: AnswerGrammar) -> None:
        self._drafter = drafter
        self._grammar = grammar
        self._forced: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        self._drafter.extend(token_ids)

    def catch_up(self) -> bool:
        return self._drafter.catch_up()

    @property
    def evidence(self) -> int | None:
        """0 for forced tokens, else one more than the other drafter's evidence."""
        self._forced = self._grammar.forced()
        if self._forced:
            return 0
        evidence = self._drafter.evidence
        return None if evidence is None else evidence + 1

    def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        if self._forced:
            return self._forced[:num_tokens]
        return self._grammar.possible(self._drafter.draft(num_tokens, sampler))
