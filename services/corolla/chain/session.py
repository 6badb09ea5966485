"""Sessions on chains: the position of each, and the steps that move it."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from corolla.chain.beginnings import named_beginnings
from corolla.chain.clock import time_s
from corolla.chain.history import TokenHistory
from corolla.chain.identity import SessionIdentity
from corolla.chain.lateness import TICK_S, TokenWaits
from corolla.chain.pending import HiddenStates
from corolla.chain.prompt_readout import PromptReadout, token_of
from corolla.chain.recovery import OpenSequences, Recovery
from corolla.chain.recovery_budget import RecoveryBudget, RecoveryReport
from corolla.chain.replay import Replayer
from corolla.chain.reservations import ALL_TOKENS, ChainBinding, ChainLimits, OpenOptions, Reservations, hop_salts
from corolla.chain.routes import Routes
from corolla.chain.standbys import Standbys
from corolla.chain.step_window import MIN_CHUNK_TOKENS, StepWindow, chunk_tokens, whole_units
from corolla.chain.streams import DataPlane
from corolla.chain.token_stream import RoundTokens, TokenStream
from corolla.chassis.errors import CorollaError, InternalError
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.tracing import spans
from corolla.decoding.parameters import SampledToken
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.page_hashes import TextDigests


class TokenReader(Protocol):
    """Receives the tokens of one sequence as they are chosen."""

    def read(self, token: SampledToken) -> bool:
        """Takes the next token. Returns whether the reader wants another one."""


class ChainSession(OpenSequences):
    """A session that is open on every hop of a chain. Its last hop chooses the tokens.

    `position` is the one authoritative count of processed tokens: it moves when a step came back from the last hop, and
    each step carries it. A step that a hop lost is sent again from the same position once the session has recovered.

    Args:
        on_pace: is called once in a long answer, with the chain and the seconds from one token to the next.

    Attributes:
        num_cached_tokens: tokens that all hops held when the session was opened.
    """

    def __init__(
        self,
        binding: ChainBinding,
        plane: DataPlane,
        recovery: Recovery,
        budget: RecoveryBudget,
        limits: ChainLimits,
        sampler: SamplerRecord,
        on_pace: Callable[[common_pb2.Chain, float], None],
        standbys: Standbys,
    ) -> None:
        super().__init__(binding, plane, recovery, standbys)
        self.num_cached_tokens = binding.num_cached_tokens
        self._budget = budget
        self._limits = limits
        self._sampler = sampler
        self._history = TokenHistory()
        # The text as far as it is known: first the prompt, then what the history adds to it.
        self._text = next(iter(binding.open_options.named_texts), TextDigests())
        self._num_prompt_tokens = len(self._text)
        self._newest_id = 0
        self._tokens: TokenStream | None = None
        self._waits = TokenWaits()
        self._on_pace = on_pace
        # The time of the first token and the position after it; None if the pace must not be measured.
        self._first_token: tuple[float, int] | None = None

    @property
    def identity(self) -> SessionIdentity:
        """The identity under which every hop has the session open, or will have once the pending open succeeds."""
        return self._binding.identities[0]

    @property
    def open_identity(self) -> SessionIdentity:
        """The identity under which every hop last opened the session, in an earlier epoch while it is opened again."""
        return self._binding.open_identities[0]

    @property
    def chain_to_record(self) -> common_pb2.Chain:
        """The chain on which the next turn finds the session, with the hops that have just taken it over."""
        return self._recovery.redirected(self._binding)

    @property
    def mixes_numerics(self) -> bool:
        """Servers of other numerics computed a part, so the next tokens may differ from an undisturbed session's."""
        return self._limits.follows_numerics and self.chain.mixes_numerics

    @property
    def position(self) -> int:
        """How many tokens the whole chain has processed."""
        return self._history.position

    @property
    def has_unread_tokens(self) -> bool:
        """`decode` would return without waiting for a hop."""
        return self._tokens is not None and self._tokens.has_unread_tokens

    @property
    def has_draft_model(self) -> bool:
        """The hop that chooses the tokens drafts with a small model."""
        return self._plane.welcome(self.chain.hops[-1].address).has_draft_model

    @property
    def num_reserved_tokens(self) -> int:
        """The number of tokens for which hops have room."""
        return self._binding.open_options.max_tokens

    @property
    def is_full(self) -> bool:
        """The hops have chosen as many tokens as they have room for, although the session may grow."""
        options = self._binding.open_options
        is_at_end = self._tokens is None and self._sampler.num_text_tokens >= options.max_tokens
        return is_at_end and options.max_tokens < options.most_tokens

    def growth_sizes(self, num_prompt_tokens: int, fewest: int) -> list[int]:
        """The sizes to which the session should grow, the best first: twice as many new tokens, or `fewest` more."""
        options = self._binding.open_options
        doubled = options.max_tokens + max(fewest, options.max_tokens - num_prompt_tokens)
        sizes = (min(doubled, options.most_tokens), min(options.max_tokens + fewest, options.most_tokens))
        return list(dict.fromkeys(sizes))

    async def grow(self, sizes: Sequence[int]) -> None:
        """Gets room for as many tokens as the first of `sizes` for which every hop has pages, if there is such a size.

        Raises CorollaError if a hop was lost and the session cannot recover.
        """
        self.end_ring()
        self._first_token = None
        await self._recovery.grow(self._binding, self._history, sizes, self._budget)

    async def restore(self, token_ids: Sequence[int], num_past_tokens: int = 0) -> None:
        """Continues from the tokens that hops hold. If only some hops hold the past, the other hops get it again.

        Args:
            token_ids: the text; its last token is always left to be processed.
            num_past_tokens: how many tokens of the text the session processed in earlier turns.
        """
        position = min(num_past_tokens, max(reply.num_cached_tokens for (reply,) in self._binding.open_replies))
        if position <= self.num_cached_tokens:
            self._history.append(token_ids[: self.num_cached_tokens], is_prompt=True)
            return
        self._history.append(token_ids[:position], is_prompt=True)
        await self._recovery.fill(self._binding, self._history, self._budget)

    async def prefill(
        self,
        token_ids: Sequence[int],
        reader: TokenReader,
        *,
        waits: bool = False,
        readout: PromptReadout | None = None,
    ) -> None:
        """Processes a prompt of at least one token in chunks, several at a time so that all hops work.

        The reader gets the token that follows the prompt.

        Args:
            waits: whether the hops choose further tokens only once `decode` is called.
            readout: what the last hop reports about the prompt.
        """
        if not token_ids:
            raise InternalError("a prompt must have at least one token")
        start = self.position
        self._look_after(start + len(token_ids), self._known_texts)
        with spans.span("prefill", position=start, tokens=len(token_ids)):
            rounds = await self._with_recovery(
                lambda: self._send_prompt(token_ids[self.position - start :], waits=waits, readout=readout),
                self._recover,
            )
        self._first_token = None if waits else (time_s(), self.position)
        self._read(rounds.sampled, reader)

    async def read_out(self, token_ids: Sequence[int], readout: PromptReadout) -> None:
        """Processes a prompt as `prefill` does, and chooses no token."""
        start = self.position
        with spans.span("prefill", position=start, tokens=len(token_ids)):
            await self._with_recovery(
                lambda: self._send_chunks(token_ids[self.position - start :], readout, is_all=True), self._recover
            )

    async def fork_from(self, source: "ChainSession", token_ids: Sequence[int], reader: TokenReader) -> None:
        """Forks the prompt that `source` processed; on the same chain the hops compute only its last token.

        `source` has processed exactly the prompt, and must not move until this returns. The reader gets the token that
        follows the prompt.
        """
        # Where the source had to write its beginning again, its pages are not those that this session holds in common.
        owns_less = source._binding.write_start < self.num_cached_tokens
        if len(token_ids) == 1 or self.chain != source.chain or owns_less:
            await self.restore(token_ids)
            await self.prefill(token_ids[self.position :], reader)
            return
        self._history.append(token_ids[:-1], is_prompt=True)
        row = self._row(token_ids[-1:], 1)
        row.source_session_id = source.identity.session_id
        with spans.span("prefill", position=row.position, tokens=1):
            try:
                self._begin(row)
                rounds = await self._next_round()
            except CorollaError as failure:
                # The hops held nothing before, so what they hold now can only be a beginning of the prompt.
                await self._recover(failure)
                rounds = await self._with_recovery(lambda: self._round(token_ids[-1]), self._recover)
        self._history.append(token_ids[-1:], is_prompt=True)
        self._read(rounds.sampled, reader)

    async def decode(self, reader: TokenReader) -> tuple[int, int]:
        """Hands the reader the tokens of the next round: one, or several if draft tokens were right.

        The position moves to the last token that the reader took. The next step begins there, and makes the hops drop
        the tokens after it.

        Returns:
            How many draft tokens were checked, and how many tokens the reader took, at least one.
        """
        newest_id = self._newest_id
        self._look_after(self.position, self._known_texts)
        if self.has_unread_tokens:
            rounds = await self._round(newest_id)
        else:
            if self._outgrows_short_factors:
                await self._take_long_factors()
            rounds = await self._with_recovery(lambda: self._round(newest_id), self._recover)
        num_taken = self._read(rounds.sampled, reader)
        token_ids = [newest_id, *(token.token_id for token in rounds.sampled.tokens)]
        self._history.append(token_ids[:num_taken], is_prompt=False)
        return rounds.num_drafted, num_taken

    def end_ring(self) -> None:
        """Stops reading tokens. The hops stop when the session is closed, parked or opened again."""
        if self._tokens is not None:
            self._plane.end_ring(self.identity.session_id, self._tokens)
            self._tokens = None

    @property
    def _outgrows_short_factors(self) -> bool:
        """The hops compute the text with short factors, and the next step makes it too long for these."""
        most = self._limits.short_factor_length
        return most is not None and self.position >= most and not self._binding.open_options.long_factors

    async def _take_long_factors(self) -> None:
        """Makes the hops compute the whole text again with the long factors, as transformers' `generate()` does."""
        self.end_ring()
        self._first_token = None
        self._sampler.pauses_at = None
        self._binding.open_options = replace(self._binding.open_options, long_factors=True)
        self._standbys.drop(self._binding)
        await self._recovery.compute_anew(self._binding, self._history, self._budget)

    async def _round(self, newest_id: int) -> RoundTokens:
        """Returns the next round's tokens. If no tokens go round, the text's last token starts the ring."""
        if self._tokens is None:
            self._begin(self._row([newest_id], 1))
        elif self.position + self._limits.max_tokens_ahead // 2 >= self._tokens.credit_end:
            credit_end = self.position + self._limits.max_tokens_ahead
            self._observe_pace(self._tokens)
            self._plane.grant(self.chain.hops[-1], self.identity, self._tokens, credit_end)
        if self.has_unread_tokens:
            return await self._next_round()
        began_s = time_s()
        await self._hedge()
        rounds = await self._next_round(time_s() - began_s)
        self._waits.add(time_s() - began_s)
        return rounds

    async def _hedge(self) -> None:
        """Waits for a token, and ends its stream if it is late and a hop is silent whose standby can go on."""
        stream, late_after_s, until_s = self._tokens, self._waits.late_after_s, time_s() + self._limits.step_timeout_s
        if stream is None or late_after_s >= self._limits.step_timeout_s or not await stream.is_late(late_after_s):
            return
        while self._budget.may_hedge and time_s() < until_s and (guarded := self._binding.standbys.guarded(self.chain)):
            self._plane.ask(guarded)
            while self._plane.awaits(guarded):
                if not await stream.is_late(TICK_S):
                    return
                if (failure := self._plane.late_hop(guarded)) is not None:
                    stream.end(failure)
                    return
            # The hops answer, so they are only busy.
            if not await stream.is_late(late_after_s):
                return

    def _begin(self, row: pb.StepRow, *, waits: bool = False) -> None:
        credit_end = 0 if waits else row.position + row.num_tokens + self._limits.max_tokens_ahead
        self._tokens = self._plane.begin_ring(self.chain.hops, row, credit_end, self._binding.max_step_tokens)

    def _observe_pace(self, tokens: TokenStream) -> None:
        """Reports once how fast the chain is, unless the chain had to wait for credit or for the reader.

        If credit is left, the chain never waited for credit. If tokens are unread, the reader is slower than the chain.
        """
        first, self._first_token = self._first_token, None
        if first is None or tokens.has_unread_tokens or self.position >= tokens.credit_end:
            return
        first_s, position = first
        if self.position > position:
            self._on_pace(self.chain, (time_s() - first_s) / (self.position - position))

    async def _next_round(self, waited_s: float = 0.0) -> RoundTokens:
        stream = self._tokens
        if stream is None:
            raise InternalError("no ring is running")
        return await stream.next(max(0.0, self._limits.step_timeout_s - waited_s))

    def _read(self, sampled: pb.SampledRow, reader: TokenReader) -> int:
        """Hands the reader the chosen tokens until it wants no more. Returns how many tokens it took."""
        taken: list[int] = []
        for token in sampled.tokens:
            taken.append(token.token_id)
            if not reader.read(token_of(token)):
                break
        self._sampler.accept(taken)
        self._newest_id = taken[-1]
        if sampled.is_last:
            self.end_ring()
        return len(taken)

    # --- the end of a turn or session -------------------------------------------------------------------------------

    def park(self, position: int, *, earlier: common_pb2.Chain, recorded: common_pb2.Chain) -> None:
        """Ends a turn: the hops keep the first `position` tokens for the next one, as long as they have room.

        Args:
            earlier: the chain of the session's last turn.
            recorded: the chain that the session's record names. Other hops free the session now, since they would get
                no request to do so later.
        """
        self.end_ring()
        session_id, epoch = self.identity.session_id, self.identity.epoch
        self._send_digests(position)
        for hop in recorded.hops:
            self._plane.notify(
                hop.address, pb.Truncate(session_id=session_id, epoch=epoch, position=position, idle=True)
            )
        left = [hop for hop in (*self.chain.hops, *earlier.hops) if hop not in recorded.hops]
        self._plane.close_session(left, self.identity)
        self._end_standbys(recorded.hops)

    def close(self) -> None:
        """Frees the session's pages on every hop. Hops may keep them in the prefix cache."""
        self.end_ring()
        self._send_digests(self.position)
        super().close()

    def _known_texts(self) -> Sequence[TextDigests]:
        if self.position > len(self._text):
            self._text.follow(self._history.token_ids)
        return [self._text] if self._binding.open_options.named_texts else []

    def _send_digests(self, num_tokens: int) -> None:
        """Sends every hop the page hashes of the tokens that it holds."""
        identity, text = self.identity, self._text
        text.follow(self._history.token_ids[:num_tokens])
        open_options = self._binding.open_options
        standbys = self._binding.standbys
        self._recovery.reservations.remember(self.chain_to_record, open_options, text, standbys=standbys.filled)
        # Other texts go on from where this one left another text, from its prompt, and from its end.
        ends = (self.num_cached_tokens, self._num_prompt_tokens, num_tokens) if self._limits.names_beginnings else ()
        named = list(named_beginnings(text, open_options.beginning_salt, ends))
        salts = hop_salts(self.chain_to_record, open_options.cache_salt, self._limits)
        # A standby that is not named holds what the sessions held before they were opened again.
        copies = [(each.hop, salts.get(server_id)) for server_id, each in standbys.by_hop.items() if each.is_named]
        for hop, salt in [*((hop, salts.get(hop.server_id)) for hop in self._holders()), *copies]:
            page_tokens = self._plane.welcome(hop.address).page_tokens
            if salt is not None and 0 < page_tokens <= num_tokens:
                holds = pb.Holds(
                    session_id=identity.session_id, epoch=identity.epoch, text=text.of(page_tokens, salt),
                    beginnings=named,
                )  # fmt: skip
                self._plane.notify(hop.address, holds)

    async def _recover(self, failure: CorollaError) -> None:
        self.end_ring()
        self._first_token = None
        await self._recovery.recover(self._binding, [self._history], failure, self._budget)

    async def _send_prompt(
        self, token_ids: Sequence[int], *, waits: bool, readout: PromptReadout | None
    ) -> RoundTokens:
        """Sends all chunks of a prompt. The last one starts the ring; returns the tokens of its first round."""
        last = await self._send_chunks(token_ids, readout, waits=waits)
        rounds = await self._next_round()
        if readout is not None:
            readout.take(self.position, len(last), rounds.sampled)
        self._history.append(last, is_prompt=True)
        return rounds

    async def _send_chunks(
        self, token_ids: Sequence[int], readout: PromptReadout | None, *, waits: bool = False, is_all: bool = False
    ) -> Sequence[int]:
        """Sends the chunks of a prompt, and waits for all but the last one, which starts the ring.

        Args:
            is_all: whether to wait for the last chunk as for the others, and to start no ring.

        Returns:
            The last chunk.
        """
        num_hops, first, max_steps = len(self.chain.hops), self.position, self._limits.max_microbatches
        num_busy_hops = min(num_hops, max_steps or num_hops)
        welcomes = [self._plane.welcome(hop.address) for hop in self.chain.hops]
        state_page_tokens = max((each.page_tokens for each in welcomes if each.keeps_states), default=0)

        def append(chunk: Sequence[int], results: Sequence[HiddenStates]) -> None:
            if readout is not None:
                readout.take(self.position, len(chunk), results[0].sampled)
            self._history.append(chunk, is_prompt=True)

        with StepWindow(num_hops, self._limits.step_timeout_s, append, max_steps) as window:
            start = 0
            while True:
                await window.make_room()
                self._renew()
                # A hop does not interrupt a chunk, so chunks are smaller while sessions decode on the chain.
                is_shared = self._plane.has_ring(self.chain.hops)
                most = self._limits.chunk_tokens(self._binding.max_step_tokens, during_decode=is_shared)
                size = chunk_tokens(len(token_ids), num_busy_hops, most)
                position = first + start
                num_left = len(token_ids) - start
                reaches_end = size >= num_left
                unit = state_page_tokens or (MIN_CHUNK_TOKENS if reaches_end and num_busy_hops > 1 else 0)
                size = whole_units(position, min(size, num_left), unit, is_last=reaches_end)
                chunk = token_ids[start : start + size]
                start += size
                is_last = start == len(token_ids)
                row = self._row(chunk, int(is_last and not is_all), position)
                if readout is not None and (asked := readout.of(position, len(chunk))) is not None:
                    row.readout.CopyFrom(asked)
                if row.num_result_tokens:
                    self._begin(row, waits=waits)
                else:
                    window.add(chunk, self._plane.step(self.chain.hops, [row], samples=True))
                if is_last:
                    break
            await window.drain()
        return chunk

    def _row(self, token_ids: Sequence[int], num_result_tokens: int, position: int | None = None) -> pb.StepRow:
        return pb.StepRow(
            session_id=self.identity.session_id,
            epoch=self.identity.epoch,
            position=self.position if position is None else position,
            num_tokens=len(token_ids),
            num_result_tokens=num_result_tokens,
            token_ids=token_ids,
        )


class ChainSessions:
    """Opens sessions, and owns the reservations and the recovery that they share."""

    def __init__(
        self,
        routes: Routes,
        plane: DataPlane,
        limits: ChainLimits,
        tasks: TaskGroup,
        on_recovery: Callable[[RecoveryReport], None] = lambda report: None,
    ) -> None:
        self.reservations = Reservations(routes, plane, limits)
        self.standbys = Standbys(routes, self.reservations, plane, tasks)
        replayer = Replayer(self.reservations, plane, limits)
        self.recovery = Recovery(routes, self.reservations, replayer, plane.handovers, limits, on_recovery)
        plane.on_load = routes.hear_load
        self._plane = plane
        self._limits = limits
        self._on_pace = routes.observe_pace
        self._running: set[ChainSession] = set()

    def count_by_server(self) -> Counter[str]:
        """Maps each server id to the number of sessions open in this process that go through the server."""
        return Counter(hop.server_id for session in self._running for hop in session.chain.hops)

    @asynccontextmanager
    async def open(
        self,
        identity: SessionIdentity,
        open_options: OpenOptions,
        sampler: SamplerRecord,
        on_recovery: Callable[[RecoveryReport], None],
        until_s: float = math.inf,
    ) -> AsyncIterator[ChainSession]:
        """Opens a session on a chain. The caller must close or park it before it leaves the context.

        Args:
            sampler: the record of how the session's tokens are chosen; the session updates it.
            on_recovery: is called for each recovery of this session.
            until_s: when the caller stops waiting, by the event loop's clock.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
        """
        short_length = self._limits.short_factor_length
        long_factors = short_length is not None and sampler.num_text_tokens > short_length
        if short_length is not None and not long_factors:
            sampler.pauses_at = short_length + 1
        open_options = replace(open_options, samplers=[sampler], long_factors=long_factors, write_start=ALL_TOKENS)
        session = ChainSession(
            await self.reservations.reserve([identity], open_options, until_s),
            self._plane,
            self.recovery,
            RecoveryBudget(self._limits.max_recoveries, on_recovery, until_s),
            self._limits,
            sampler,
            self._on_pace,
            self.standbys,
        )
        self._running.add(session)
        try:
            yield session
        finally:
            self._running.discard(session)
            session.end_ring()

    async def free(self, identity: SessionIdentity, chain: common_pb2.Chain) -> None:
        """Frees a session on the hops of a chain although it is not open in this process, for example when deleted."""
        # A hop that cannot be reached frees the session when the session's lease ends.
        await asyncio.gather(*(self._plane.connect(hop.address) for hop in chain.hops), return_exceptions=True)
        self._plane.close_session(chain.hops, identity)
