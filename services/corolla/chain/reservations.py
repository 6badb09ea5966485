"""Reserves sessions on chains: on every hop of one chain, or nowhere."""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from corolla.chain.identity import SessionIdentity
from corolla.chain.quarantine import LostServers
from corolla.chain.recovery_plan import HopState
from corolla.chain.routes import Routes
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import (
    AdapterNotLoaded,
    CapabilityDenied,
    CorollaError,
    HopLeaving,
    HopUnavailable,
    InvalidRequest,
    NoAdapterRoom,
    NoChain,
    OutOfPages,
    QueueFull,
    RouterUnavailable,
    StoreUnavailable,
)
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import PARENT_HEADER, STATE_HEADER, trace_headers
from corolla.decoding.sampler_record import SamplerRecord
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.frames import MAX_PROMPT_BYTES, Buffer
from corolla.wire.page_hashes import TextDigests
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_MAX_REFUSALS: Final = 3
_ALL_TOKENS: Final = 2**31
# A hop may believe another authority than the others for a while, or have another time.
_AVOIDABLE: Final = (HopUnavailable, HopLeaving, OutOfPages, QueueFull, CapabilityDenied, AdapterNotLoaded)

LONGEST_BUSY_PAUSE_S: Final = 1.0
"""Until a hop is asked again that had too many sessions to open. They do not all come at once."""


class TrainedPrompts(Protocol):
    """Embeddings that a session adds to the input of each of its blocks."""

    def part(self, start: int, end: int) -> tuple[pb.BlockPrompts, Buffer]:
        """Those of the blocks `[start, end)`, and what they are. Blocks are counted from the session's first one."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Sizes and times of steps, leases and recoveries.

    Attributes:
        max_recoveries: of one request; after them its failure is the caller's. More losses than that within one answer
            have a cause that recovering does not heal.
        recovery_patience_s: how long a request waits for a server that was lost, or for one that can replace it.
        max_replayed_tokens: of all recoveries at a time, so that a server's death does not become a stampede: what a
            hop on processors computes in some seconds.
        merges_replayed_steps: whether tokens that were processed one by one are replayed in chunks.
        max_tokens_ahead: so far hops go on choosing tokens that nobody has read yet.
        short_factor_length: tokens of the longest text with the short factors of a longrope embedding; None: no text
            has others.
        max_microbatches: steps of one sequence's prompt under way at a time, which keep as many hops busy; 0: enough
            for all hops.
    """

    prefill_chunk_tokens: int
    prefill_chunk_tokens_during_decode: int
    step_timeout_s: float
    lease_ms: int
    max_recoveries: int = 16
    recovery_patience_s: float = 30.0
    max_replayed_tokens: int = 8192
    merges_replayed_steps: bool = True
    max_tokens_ahead: int = 32
    short_factor_length: int | None = None
    max_microbatches: int = 0


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a session needs of its hops.

    Attributes:
        max_tokens: pages for so many are reserved.
        lease_ms: how long the hops keep it without hearing of it; None is the configured lease.
        recorded_chain: of its last turn; those hops keep what they hold of it.
        record_id: the id under which the router knows the session, if it does.
        only_chain: where nothing is planned.
        blocks: of the planned chain only these.
        texts: of each session all tokens that it is going to hold, as far as they are known; hops may hold their
            beginnings already. The last token is left to be processed. None where the sessions are given other things.
        cache_salt: hops share what they compute for the texts only where this is the same.
        max_position: what hops hold beyond is not the session's text any more.
        prompts: trained embeddings for each session; None without.
        adapter: with which the hops compute the sessions; None: with none.
        long_factors: they compute them with the long factors of a longrope embedding.
        samplers: for each session how its last hop is to choose tokens; None where it is to send hidden states.
        keeps_outputs: whether hops keep what they send on, for the case that the next one is lost.
        trace: of the request, as headers; empty where it is not traced.
    """

    max_tokens: int
    transient: bool
    lease_ms: int | None = None
    recorded_chain: common_pb2.Chain | None = None
    record_id: str = ""
    only_chain: common_pb2.Chain | None = None
    blocks: Span | None = None
    texts: Sequence[Sequence[int]] | None = None
    cache_salt: bytes = b""
    max_position: int | None = None
    prompts: Sequence[TrainedPrompts] | None = None
    adapter: AdapterVersion | None = None
    long_factors: bool = False
    samplers: Sequence[SamplerRecord] | None = None
    keeps_outputs: bool = True
    trace: Mapping[str, str] = field(default_factory=dict)

    def resumes(self, hop: common_pb2.Hop) -> bool:
        """Whether the hop may hold something of the session that counts."""
        return self.recorded_chain is not None and hop in self.recorded_chain.hops


@dataclass(slots=True)
class ChainBinding:
    """Sessions that are open on every hop of one chain, in one epoch. A recovery binds them to another chain.

    Attributes:
        identities: of the sessions; during a recovery in the epoch in which hops are to open them.
        max_step_tokens: that every hop takes in one step.
        open_replies: what each hop answered for each session when the chain was opened.
        open_identities: the identities in which every hop of the chain opened them last.
    """

    identities: tuple[SessionIdentity, ...]
    chain: common_pb2.Chain
    open_options: OpenOptions
    max_step_tokens: int
    open_replies: Sequence[Sequence[pb.Opened]] = ()
    open_identities: tuple[SessionIdentity, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.open_identities = self.identities

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that every hop holds of every session, and can continue from."""
        replies = [reply for on_hop in self.open_replies for reply in on_hop]
        position = min(reply.num_cached_tokens for reply in replies)
        if self.open_options.max_position is not None:
            position = min(position, self.open_options.max_position)
        # A sliding window may have moved beyond the end of what others hold.
        return position if position >= max(reply.min_position for reply in replies) else 0

    def hop_states(self, number: int) -> list[HopState]:
        """What each hop held of one of the sessions when the chain was opened."""
        return [
            HopState(reply.num_cached_tokens, reply.min_position, reply.kept_start, reply.kept_end)
            for reply in (on_hop[number] for on_hop in self.open_replies)
        ]

    def raise_epoch(self) -> None:
        """Fences off what hops answer in the old epoch. Raises HopUnavailable where the turn has no further epoch."""
        self.identities = tuple(identity.in_next_epoch() for identity in self.identities)

    def rebind(self, opened: "ChainBinding") -> None:
        """Every hop of another chain, or of the same one, has opened the sessions now."""
        self.chain, self.max_step_tokens = opened.chain, opened.max_step_tokens
        self.open_replies, self.open_identities = opened.open_replies, opened.identities


class Attempts:
    """The attempts of one request: servers that were `too_full`, or `lost` since they did not answer or refused.

    `num_refused` counts the attempts that failed though every server answered. A server that was busy is none of them.
    `without_adapter` says why a server could not have the session's adapter.
    """

    def __init__(self, patience_s: float) -> None:
        self.too_full: set[str] = set()
        self.lost = LostServers(patience_s)
        self.num_refused = 0
        self.without_adapter: CorollaError | None = None

    def record(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]], now_s: float) -> None:
        """What hops answered in one attempt."""
        if not any(isinstance(failure, HopUnavailable | QueueFull) for _, failure in failures):
            self.num_refused += 1
        for hop, failure in failures:
            if isinstance(failure, AdapterNotLoaded | NoAdapterRoom):
                self.without_adapter = failure
            if isinstance(failure, OutOfPages):
                self.too_full.add(hop.server_id)
            elif not isinstance(failure, QueueFull):
                self.lost.add(hop.server_id, now_s, for_good=not isinstance(failure, HopUnavailable))

    def excluded(self, now_s: float, *, as_last_resort: bool) -> frozenset[str]:
        """Servers that are not asked now. `as_last_resort`, those are asked that may have come back."""
        excluded = self.too_full.union(self.lost)
        return frozenset(excluded - self.lost.retryable(now_s) if as_last_resort else excluded)


class NotOpened(Exception):
    """Some hops of a chain did not open; the others did."""

    def __init__(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]]) -> None:
        super().__init__()
        self.failures = failures

    @property
    def is_for_now(self) -> bool:
        """Whether a hop had too many sessions to open, and is well otherwise."""
        return any(isinstance(failure, QueueFull) for _, failure in self.failures)


class Reservations:
    """Opens sessions on the hops of chains."""

    def __init__(self, routes: Routes, plane: DataPlane, limits: ChainLimits) -> None:
        self._routes = routes
        self._plane = plane
        self._limits = limits

    async def reserve(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, until_s: float = math.inf
    ) -> ChainBinding:
        """Opens sessions, all of them on one chain.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.
        A hop that has too many sessions to open is asked again.
        Where there is no chain without a hop that could not be reached, it is asked again and again: it may be slow, or
        the connection to blame. Nobody waits after `until_s` of the event loop's clock.

        Raises:
            NoChain, OutOfPages, HopUnavailable, QueueFull: nothing stays allocated.
            InvalidRequest: the prompts are too large for a hop.
        """
        if trace := trace_headers():
            open_options = replace(open_options, trace=trace)
        clock = asyncio.get_running_loop().time
        attempts = Attempts(self._limits.recovery_patience_s)
        give_up_s = min(until_s, clock() + self._limits.recovery_patience_s)
        while True:
            try:
                chain = open_options.only_chain or await self._choose(
                    len(identities), open_options, attempts, give_up_s
                )
            except (NoChain, OutOfPages):
                if attempts.without_adapter is not None:
                    raise attempts.without_adapter from None
                raise
            if any(hop.server_id in attempts.lost for hop in chain.hops):
                # An open may have come through whose answer did not: it is taken back on the new connection.
                await asyncio.gather(*(self._plane.connect(hop.address) for hop in chain.hops), return_exceptions=True)
                self._undo(identities, open_options, chain)
            try:
                return await self.open(identities, open_options, chain)
            except NotOpened as refused:
                failures, is_for_now = refused.failures, refused.is_for_now
            self._undo(identities, open_options, chain)
            attempts.record(failures, clock())
            for hop, failure in failures:
                self._routes.on_open_refused(hop.server_id, failure)
            hard = [failure for _, failure in failures if not isinstance(failure, _AVOIDABLE)]
            has_had_enough = attempts.num_refused == _MAX_REFUSALS or clock() >= give_up_s
            if hard or has_had_enough or open_options.only_chain is not None:
                raise (hard or [failure for _, failure in failures])[0]
            reason = getattr(failures[0][1], "reason", "INTERNAL")
            log.warning("chain not opened; trying another", extra={"reason": reason})
            if is_for_now:
                await asyncio.sleep(random.uniform(0, LONGEST_BUSY_PAUSE_S))

    async def open(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain
    ) -> ChainBinding:
        """Opens sessions on just this chain.

        Raises NotOpened: what did open stays so, and is the caller's to give back.
        """
        with spans.span("open") as span:
            if span.is_sampled:
                span.note(hops=[f"{hop.address} {Span.of(hop.span)}" for hop in chain.hops], epoch=identities[0].epoch)
            return await self._open(identities, open_options, chain)

    async def _open(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain
    ) -> ChainBinding:
        last = len(chain.hops) - 1
        # What trained prompts make of a text is no other session's.
        texts = (
            None
            if open_options.prompts is not None or open_options.texts is None
            else [TextDigests(text, open_options.cache_salt) for text in open_options.texts]
        )
        opens = [
            self._open_on(
                hop,
                identities,
                open_options,
                texts,
                keep_activations=open_options.keeps_outputs and number < last,
                samples=number == last,
            )
            for number, hop in enumerate(chain.hops)
        ]
        try:
            answers = await asyncio.gather(*opens)
        except asyncio.CancelledError:
            self._undo(identities, open_options, chain)
            raise
        failures = [
            (hop, answer)
            for hop, on_hop in zip(chain.hops, answers, strict=True)
            for answer in on_hop
            if isinstance(answer, BaseException)
        ]
        if failures:
            raise NotOpened(failures)
        opened = [[answer for answer in on_hop if not isinstance(answer, BaseException)] for on_hop in answers]
        return ChainBinding(
            tuple(identities),
            chain,
            open_options,
            max_step_tokens=min(max_tokens for on_hop in opened for _, max_tokens in on_hop),
            open_replies=[[reply for reply, _ in on_hop] for on_hop in opened],
        )

    def give_back(self, identities: Sequence[SessionIdentity], hops: Sequence[common_pb2.Hop]) -> None:
        """Frees sessions on some hops. What a hop holds of a later epoch, it keeps."""
        for identity in identities:
            self._plane.close_session(hops, identity)

    async def _choose(
        self, num_sessions: int, open_options: OpenOptions, attempts: Attempts, give_up_s: float
    ) -> common_pb2.Chain:
        """A chain of servers that may open the sessions; waits for one while a server may be back soon."""
        first_failure: CorollaError | None = None

        async def plan(now_s: float, *, as_last_resort: bool) -> common_pb2.Chain:
            excluded_ids = attempts.excluded(now_s, as_last_resort=as_last_resort)
            num_tokens = open_options.max_tokens * num_sessions
            if open_options.recorded_chain is not None:
                # Where hops of the last turn are gone, those that remain keep what they hold.
                chain = await self._routes.replan_recorded(
                    open_options.recorded_chain, excluded_ids, num_tokens=num_tokens
                )
                if chain is not None:
                    return chain
            return await self._routes.plan(
                num_tokens=num_tokens,
                record_id=open_options.record_id,
                blocks=open_options.blocks,
                excluded_ids=excluded_ids,
                are_some_full=bool(attempts.too_full),
                # Else what was pushed has to do: all who wait would ask the router again and again.
                asks_router=first_failure is None,
            )

        while True:
            now_s = asyncio.get_running_loop().time()
            try:
                return await plan(now_s, as_last_resort=False)
            except (NoChain, RouterUnavailable, StoreUnavailable) as failure:
                first_failure = first_failure or failure
                with contextlib.suppress(NoChain, RouterUnavailable, StoreUnavailable):
                    return await plan(now_s, as_last_resort=True)
                may_succeed = attempts.lost.may_return(now_s) or self._routes.is_settling
                if asyncio.get_running_loop().time() >= give_up_s or not may_succeed:
                    raise first_failure from None
            await self._routes.wait_for_update(give_up_s)

    async def _open_on(
        self,
        hop: common_pb2.Hop,
        identities: Sequence[SessionIdentity],
        open_options: OpenOptions,
        texts: Sequence[TextDigests] | None,
        *,
        keep_activations: bool,
        samples: bool,
    ) -> list[tuple[pb.Opened, int] | BaseException]:
        # Prompts may be large: only one session's wait to be written.
        turn = contextlib.nullcontext() if open_options.prompts is None else asyncio.Lock()

        async def open_one(number: int) -> tuple[pb.Opened, int]:
            async with turn:
                welcome = await self._plane.connect(hop.address)
                if not Span.of(welcome.span).covers(Span.of(hop.span)):
                    raise HopUnavailable("another server has a hop's address, with other blocks", hop.address)
                request = pb.Open(
                    session_id=identities[number].session_id,
                    epoch=identities[number].epoch,
                    tenant=identities[number].tenant,
                    resume=open_options.resumes(hop),
                    max_tokens=open_options.max_tokens,
                    blocks=hop.span,
                    lease_ms=open_options.lease_ms or self._limits.lease_ms,
                    transient=open_options.transient,
                    keep_activations=keep_activations,
                    long_factors=open_options.long_factors,
                )
                if open_options.adapter is not None:
                    request.adapter.CopyFrom(open_options.adapter.to_message())
                if open_options.trace:
                    trace = open_options.trace
                    request.trace.parent, request.trace.state = trace[PARENT_HEADER], trace.get(STATE_HEADER, "")
                if texts is not None and welcome.page_tokens:
                    request.text.CopyFrom(texts[number].of(welcome.page_tokens))
                if samples and open_options.samplers is not None:
                    request.sampler.CopyFrom(open_options.samplers[number].message())
                return await self._plane.open(hop.address, request, _describe_prompts(request, number, open_options))

        return await asyncio.gather(*map(open_one, range(len(identities))), return_exceptions=True)

    def _undo(self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain) -> None:
        """What an open that failed in part has taken is given back; what hops held before, they keep."""
        self.give_back(identities, [hop for hop in chain.hops if not open_options.resumes(hop)])
        for hop in filter(open_options.resumes, chain.hops):
            for each in identities:
                keep = pb.Truncate(session_id=each.session_id, epoch=each.epoch, position=_ALL_TOKENS, idle=True)
                self._plane.notify(hop.address, keep)


def _describe_prompts(request: pb.Open, number: int, open_options: OpenOptions) -> Buffer:
    """The payload for just the blocks of an open, which is given its size."""
    if open_options.prompts is None:
        return b""
    first = open_options.blocks.start if open_options.blocks is not None else 0
    start, end = request.blocks.start, request.blocks.end
    description, payload = open_options.prompts[number].part(start - first, end - first)
    if len(payload) > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            "block_prompts",
            f"those of blocks {start}:{end} take {len(payload) >> 20} MiB; a hop takes at most "
            f"{MAX_PROMPT_BYTES >> 20} MiB",
        )
    request.block_prompts.CopyFrom(description)
    return payload
