"""Makes what an answer begins with: its prompt, limits, room, sampler record, and the tokens that there are."""

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from corolla.chain.session import ChainSession
from corolla.chassis.errors import InvalidRequest, QuotaExceeded, context_exceeded
from corolla.client.generation.answer import Answer
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.resumption import read_last_answer, replay_answer
from corolla.client.output_parsing.deltas import Delta
from corolla.client.quotas.enforcer import Allowance
from corolla.client.reply_sizes import TokenWidths
from corolla.client.text.tokenizer import TextTokenizer
from corolla.decoding.sampler_record import SamplerRecord
from corolla.decoding.stopping import FinishReason, StopDecider
from corolla.v1 import blocks_pb2, router_pb2
from corolla.v1 import generation_pb2 as pb

NextPrompt = Callable[[router_pb2.SessionRecord], tuple[int, Sequence[int]]]
"""Takes a session's record, which is empty for a request without a session. Returns how many first tokens the new token
log shares with the old one, and the new log."""

Result = TypeVar("Result")

_NUM_THREADS: Final = 4
GROWTH_PATIENCE_S: Final = 30.0
_GROWTH_INTERVAL_S: Final = 0.5
DRAFT_SOURCES: Final = {
    pb.SPECULATION_MODE_OFF: blocks_pb2.Drafts.SOURCE_UNSPECIFIED,
    pb.SPECULATION_MODE_PROMPT_LOOKUP: blocks_pb2.Drafts.SOURCE_PROMPT_LOOKUP,
    pb.SPECULATION_MODE_DRAFT_MODEL: blocks_pb2.Drafts.SOURCE_DRAFT_MODEL,
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The model's limits for answers.

    `vocab_size`: the number of tokens that the model knows; its tokenizer may have more.
    `default_max_tokens`: the most tokens of an answer whose request sets no number; None: the rest of the context.
    `may_speculate`: whether hops can remove wrong draft tokens.
    `growth_tokens`: the tokens for which an answer without a limit reserves pages at first, and the fewest that it asks
    for later: with pages for the rest of its context, it would refuse others, and most answers are short.
    """

    context_length: int
    vocab_size: int
    default_max_tokens: int | None
    eos_token_ids: frozenset[int]
    may_speculate: bool = True
    growth_tokens: int = 256


class AnswerRoom:
    """The tokens for which the answers to one request have reserved pages, and quota of their tenant.

    Args:
        first_tokens: for how many tokens each answer's session has room at first, prompt included.
        growth_tokens: the fewest further tokens that an answer asks for.
    """

    def __init__(
        self, allowance: Allowance, num_prompt_tokens: int, first_tokens: int, growth_tokens: int, num_answers: int
    ) -> None:
        self._allowance = allowance
        self._growth_tokens = growth_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self.first_tokens = first_tokens
        self._sizes = [first_tokens] * num_answers

    @property
    def num_tokens(self) -> int:
        """How many tokens count for the quota: the prompt once, and all answers."""
        return self._num_prompt_tokens + sum(size - self._num_prompt_tokens for size in self._sizes)

    async def grow(self, index: int, session: ChainSession) -> bool:
        """Doubles the room for an answer, or adds to it what quota and pages allow; waits a while for pages.

        Returns False if there is no more room.
        """
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + GROWTH_PATIENCE_S
        held = session.num_reserved_tokens
        while True:
            wanted = session.growth_sizes(self._num_prompt_tokens, self._growth_tokens)
            sizes = await self._sizes_within_quota(index, wanted)
            if not sizes:
                return False
            try:
                await session.grow(sizes)
            finally:
                self._sizes[index] = session.num_reserved_tokens
            if session.num_reserved_tokens != sizes[0]:
                await self._allowance.take_reserved(self.num_tokens)
            if session.num_reserved_tokens > held:
                return True
            if clock() >= give_up_s:
                return False
            await asyncio.sleep(random.uniform(0.5, 1.5) * _GROWTH_INTERVAL_S)

    async def _sizes_within_quota(self, index: int, sizes: Sequence[int]) -> Sequence[int]:
        """The sizes that the quota allows, which come with the largest one first; takes the quota for that one."""
        held = self._sizes[index]
        for number, size in enumerate(sizes):
            self._sizes[index] = size
            try:
                await self._allowance.take_reserved(self.num_tokens)
            except QuotaExceeded:
                self._sizes[index] = held
                continue
            return sizes[number:]
        return ()


class AnswerFactory:
    """Makes the parts of answers to requests.

    Args:
        drafts: the source of draft tokens for requests that choose none, and the most tokens of all requests.
        widths: how wide tokens are in a reply.
    """

    def __init__(
        self, tokenizer: TextTokenizer, limits: ModelLimits, drafts: blocks_pb2.Drafts, widths: TokenWidths
    ) -> None:
        # Prompts are tokenised in threads of their own: long ones must not delay other work in threads, such as reading
        # keys.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "prompts")
        self.tokenizer = tokenizer
        self._limits = limits
        self._default_drafts = drafts
        self._widths = widths

    async def prompt(
        self, next_prompt: NextPrompt, record: router_pb2.SessionRecord, request: AnyRequest
    ) -> tuple[int, Sequence[int], int]:
        """Returns what `next_prompt` makes, and the most new tokens.

        Raises InvalidRequest if the text has a token that the model does not know, and what `_max_tokens` raises.
        """
        num_kept_tokens, prompt_ids = await self._in_thread(next_prompt, record)
        if (largest := max(prompt_ids, default=0)) >= self._limits.vocab_size:
            raise InvalidRequest("prompt", f"has the token {largest}; the model knows {self._limits.vocab_size} tokens")
        return num_kept_tokens, prompt_ids, self._max_tokens(len(prompt_ids), request)

    def room(self, allowance: Allowance, num_prompt_tokens: int, max_tokens: int, request: AnyRequest) -> AnswerRoom:
        """The room for the answers to a request."""
        first, growth_tokens = max_tokens, self._limits.growth_tokens
        if request.max_tokens is None:
            first = min(max_tokens, len(request.resumption.received_ids) + growth_tokens)
        return AnswerRoom(
            allowance, num_prompt_tokens, num_prompt_tokens + first, growth_tokens, request.num_completions
        )

    def sampler(
        self,
        request: AnyRequest,
        prompt_ids: Sequence[int],
        max_tokens: int,
        index: int = 0,
    ) -> SamplerRecord:
        """The sampler record of an answer, with a fresh seed if neither the request nor its name gives one.

        Several answers to one request have consecutive seeds.
        """
        params = request.resumption.seeded(request.sampling, request.caller.tenant)
        return SamplerRecord(
            params,
            secrets.randbits(64) if params.seed is None else params.seed + index,
            prompt_ids,
            generated_ids=request.resumption.received_ids,
            max_new_tokens=max_tokens,
            end_token_ids=() if request.ignore_eos else self._limits.eos_token_ids,
            drafts=self._drafts(request.speculation),
            grammar=request.grammar,
        )

    async def begun(self, prompt_ids: Sequence[int], max_tokens: int, request: AnyRequest) -> Answer:
        """An answer that holds the tokens that its caller has already."""
        decider = StopDecider(
            max_new_tokens=max_tokens,
            eos_token_ids=self._limits.eos_token_ids,
            ignore_eos=request.ignore_eos,
            time_limit_s=request.time_limit_s,
        )
        answer = self._empty(prompt_ids, decider, request)
        if request.resumption.received_ids:
            # A thread decodes these tokens, since all answers share the event loop.
            await self._in_thread(request.resumption.replay_into, answer)
        return answer

    async def replayed(self, record: router_pb2.SessionRecord, request: AnyRequest) -> list[Delta]:
        """The deltas of the session's last answer, made from its record without computing."""
        prompt_ids, tokens = read_last_answer(record)
        usage = request.caller.usage
        usage.prompt_tokens = usage.cached_tokens = len(prompt_ids)
        answer = self._empty(prompt_ids, StopDecider(max_new_tokens=len(record.token_log), ignore_eos=True), request)
        return await self._in_thread(replay_answer, answer, tokens, FinishReason(record.last_finish_reason))

    def _max_tokens(self, num_prompt_tokens: int, request: AnyRequest) -> int:
        """The most new tokens: as many as the request asks for, or as the context has room for.

        Raises ContextLengthExceeded if the prompt leaves no room for an answer, ReplyTooLarge, and QueueFull
        if the service has no room for the prompt in the reply.
        """
        room = self._limits.context_length - num_prompt_tokens
        num_echoed = request.num_echoed(num_prompt_tokens)
        of_reply = self._widths, request.num_completions, request.reply_logprobs, num_echoed
        most = request.reply.most_tokens(*of_reply)
        wanted = self._limits.default_max_tokens if request.max_tokens is None else request.max_tokens
        if room < (0 if wanted == 0 else 1):
            raise context_exceeded(self._limits.context_length, num_prompt_tokens)
        if request.max_tokens is not None:
            request.reply.check_tokens(min(request.max_tokens, room), *of_reply)
        elif most is not None and (room := min(room, most)) < 1:
            request.reply.check_tokens(1, *of_reply)
        request.caller.expect_reply(request.reply.echo_bytes(*of_reply))
        return room if wanted is None else min(wanted, room)

    def _drafts(self, speculation: pb.SpeculationParameters) -> blocks_pb2.Drafts | None:
        defaults, wanted = self._default_drafts, DRAFT_SOURCES.get(speculation.mode)
        if wanted and not self._limits.may_speculate:
            raise InvalidRequest(
                "speculation.mode",
                "is not possible with this model: draft tokens cannot be removed from its recurrent state",
            )
        source = defaults.source if wanted is None else wanted
        if not source or not self._limits.may_speculate:
            return None
        most = min(speculation.max_draft_tokens or defaults.max_tokens, defaults.max_tokens)
        return blocks_pb2.Drafts(source=source, max_tokens=most, is_adaptive=defaults.is_adaptive)

    def _empty(self, prompt_ids: Sequence[int], decider: StopDecider, request: AnyRequest) -> Answer:
        parser, shown_ids = None, frozenset[int]()
        if (output_parsing := request.output_parsing) is not None:
            parser = output_parsing.parser(self.tokenizer, prompt_ids, request.turn_name)
            shown_ids = output_parsing.shown_ids(self._limits.eos_token_ids)
        return Answer(
            self.tokenizer, prompt_ids, decider, request.stop_sequences, parser, shown_ids, request.caller.started_s
        )

    async def _in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
