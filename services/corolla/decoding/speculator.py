"""Speculation within one answer: which drafter, how much, and what became of it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from corolla.chassis.errors import InvalidRequest, NonFiniteOutput
from corolla.decoding.compute_thread import ComputeThread
from corolla.decoding.draft_model import DRAFT_MODEL_RATES, DraftModel, ModelDrafter
from corolla.decoding.prompt_lookup import LOOKUP_RATES, PromptLookup
from corolla.decoding.sampling import Sampler
from corolla.decoding.speculation import DraftLength


class SpeculationMode(StrEnum):
    """Which drafter. The values are those of the setting and of the command line."""

    OFF = "off"
    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What a caller may say about speculation; None leaves it to the service."""

    mode: SpeculationMode | None = None
    max_draft_tokens: int | None = None


CountDraft = Callable[[int, int], None]
"""Tokens drafted in a step, and how many of them were right."""


class Drafter(Protocol):
    """Follows a text and drafts its next tokens."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the next tokens of the text."""

    @property
    def evidence(self) -> int | None:
        """The kind of evidence for a draft now; None where there is nothing to draft from."""

    async def prepare(self) -> None:
        """Does ahead what a first draft would have to do."""

    async def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        """At most so many tokens; the sampler is the answer's own and stays as it is."""


class Speculator:
    """Drafts for one answer with the answer's own sampler, and learns from each of its steps.

    Args:
        prompt_ids: all tokens before the answer.
        count: is called for each draft that was checked.
    """

    def __init__(
        self,
        drafter: Drafter,
        length: DraftLength,
        sampler: Sampler,
        prompt_ids: Sequence[int],
        count: CountDraft,
    ) -> None:
        self._drafter = drafter
        self._count = count
        self._length = length
        self._sampler = sampler
        self._prompt_ids = prompt_ids
        self._evidence: int | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._step_began_s = 0.0

    def start(self) -> None:
        """Gets ready while the chain processes the prompt. `close` must follow."""
        self._preparing = asyncio.create_task(self._prepare())

    async def draft(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Drafts at most `max_tokens` that follow `token_ids`, which the answer got since the last call."""
        self._step_began_s = time.monotonic()
        if self._preparing is not None:
            await self._preparing
            self._preparing = None
            self._step_began_s = time.monotonic()
        self._drafter.extend(token_ids)
        self._evidence = self._drafter.evidence
        if self._evidence is None:
            return []
        num_tokens = self._length.choose(self._evidence, max_tokens)
        if num_tokens == 0:
            return []
        try:
            return await self._drafter.draft(num_tokens, self._sampler)
        except NonFiniteOutput:
            return []  # of the draft model; the target's own output decides

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """The step of the last draft came back, and this is what became of it."""
        took_s = time.monotonic() - self._step_began_s
        self._length.observe(self._evidence, num_drafted, num_accepted, took_s)
        if num_drafted:
            self._count(num_drafted, num_accepted)

    def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()

    async def _prepare(self) -> None:
        await asyncio.to_thread(self._drafter.extend, self._prompt_ids)
        await self._drafter.prepare()


class Speculators:
    """Makes the speculators of all answers; the defaults hold where a caller does not say.

    Args:
        max_draft_tokens: of one step, at most and where a caller does not say.
        is_adaptive: whether the number of draft tokens follows their success and cost.
    """

    def __init__(
        self,
        compute: ComputeThread,
        default_mode: SpeculationMode = SpeculationMode.OFF,
        max_draft_tokens: int = 16,
        draft_model: DraftModel | None = None,
        *,
        is_adaptive: bool = True,
    ) -> None:
        self._compute = compute
        self._default_mode = default_mode
        self._max_draft_tokens = max_draft_tokens
        self._draft_model = draft_model
        self._is_adaptive = is_adaptive

    def check(self, options: SpeculationOptions) -> None:
        """Raises InvalidRequest where a draft model is asked for and there is none."""
        if options.mode is SpeculationMode.DRAFT_MODEL and self._draft_model is None:
            raise InvalidRequest("speculation.mode", "this service has no draft model; prompt lookup needs none")

    def make(
        self, options: SpeculationOptions, sampler: Sampler, prompt_ids: Sequence[int], count: CountDraft
    ) -> Speculator | None:
        """None where nothing is to be drafted. `prompt_ids` are all tokens before the answer."""
        mode = options.mode or self._default_mode
        max_draft_tokens = min(options.max_draft_tokens or self._max_draft_tokens, self._max_draft_tokens)
        drafter: Drafter
        if mode is SpeculationMode.PROMPT_LOOKUP:
            drafter, rates = _LookupDrafter(), LOOKUP_RATES
        elif mode is SpeculationMode.DRAFT_MODEL and self._draft_model is not None:
            drafter, rates = ModelDrafter(self._draft_model, self._compute), DRAFT_MODEL_RATES
        else:
            return None
        length = DraftLength(max_draft_tokens, rates, is_adaptive=self._is_adaptive)
        return Speculator(drafter, length, sampler, prompt_ids, count)


class _LookupDrafter:
    """`PromptLookup` as a drafter; looking up takes no time worth a thread."""

    def __init__(self) -> None:
        self._lookup = PromptLookup()

    def extend(self, token_ids: Iterable[int]) -> None:
        self._lookup.extend(token_ids)

    @property
    def evidence(self) -> int | None:
        return self._lookup.evidence

    async def prepare(self) -> None:
        pass

    async def draft(self, num_tokens: int, sampler: Sampler) -> list[int]:
        return self._lookup.draft(num_tokens)
