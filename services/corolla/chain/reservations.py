"""Opens sessions on all hops of a chain, or on none of them."""

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from corolla.chain.cache_salts import salt_behind
from corolla.chain.clock import time_s
from corolla.chain.fetches import Fetches
from corolla.chain.identity import SessionIdentity
from corolla.chain.quarantine import LostServers
from corolla.chain.rewinds import Rewinds, without_taken_back
from corolla.chain.routes import Routes
from corolla.chain.standby_hops import StandbyHops
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
from corolla.chassis.tenant_limits import StandbyMode
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import PARENT_HEADER, STATE_HEADER, trace_headers
from corolla.decoding.sampler_record import SamplerRecord
from corolla.planning.numerics import numerics_of
from corolla.planning.ready_in import waits_until
from corolla.trust.capabilities import RENEWAL_S
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.frames import MAX_PROMPT_BYTES, Buffer
from corolla.wire.page_hashes import TextDigests
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_MAX_REFUSALS: Final = 3
_MAX_WAITS: Final = 8
"""How often a session waits for pages of its text that others compute, for half a second on average."""
ALL_TOKENS: Final = 2**31
"""More tokens than any session has."""
# Failures that another chain may avoid. CapabilityDenied is one: for a while a hop may trust another authority than the
# other hops do, or its clock may be wrong.
_AVOIDABLE: Final = (HopUnavailable, HopLeaving, OutOfPages, QueueFull, CapabilityDenied, AdapterNotLoaded)

LONGEST_BUSY_PAUSE_S: Final = 1.0
"""The longest random pause before a hop with too many sessions to open is asked again, so that requests spread out."""


TrainedPrompts = Callable[[int, int], tuple[pb.BlockPrompts, Buffer]]
"""Gives the description and the raw bytes of the embeddings that a session adds to the input of its blocks `[start,
end)`, counted from the session's first one."""


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Sizes and times of steps, leases and recoveries.

    Attributes:
        prefill_chunk_tokens: the most tokens of a prompt's chunk; 0: half of what the chain's servers take in a step.
        fewer_during_decode: the most tokens are divided by this while tokens of other sessions go round the chain.
        step_timeout_s: how long a client service waits for a step's answer.
        lease_ms: how long hops keep a session without hearing of it.
        max_recoveries: attempts for one request; after them the caller gets the failure. More losses than that within
            one answer have a cause that a recovery does not remove.
        recovery_patience_s: how long a request waits for a server that was lost, or for one that can replace it.
        max_replayed_tokens: the most tokens that all recoveries together replay at a time, so that a server's death
            does not overload the others. A hop on CPUs computes the default number in a few seconds.
        max_tokens_ahead: how many unread tokens hops may choose ahead of the reader.
        short_factor_length: tokens of the longest text that uses the short factors of a longrope embedding; None: the
            model does not switch factors.
        max_microbatches: how many steps of one sequence's prompt may be under way at a time; each keeps one hop busy;
            0: enough for all hops.
        follows_numerics: whether tokens may depend on the servers' numerics; see `tokens_follow_numerics`.
        names_beginnings: whether hops learn by which digests other client services find the texts that they hold.
    """

    prefill_chunk_tokens: int
    step_timeout_s: float
    lease_ms: int
    max_recoveries: int = 16
    recovery_patience_s: float = 30.0
    max_replayed_tokens: int = 8192
    max_tokens_ahead: int = 32
    short_factor_length: int | None = None
    max_microbatches: int = 0
    follows_numerics: bool = True
    names_beginnings: bool = False
    fewer_during_decode: int = 4

    def chunk_tokens(self, max_step_tokens: int, *, during_decode: bool = False) -> int:
        """The most tokens of a prompt's chunk.

        Args:
            max_step_tokens: the most tokens that the chain's servers take in a step.
            during_decode: whether tokens of other sessions go round the chain.
        """
        most = min(self.prefill_chunk_tokens or max_step_tokens // 2, max_step_tokens)
        return max(1, most // self.fewer_during_decode) if during_decode else max(1, most)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The settings with which hops open a session.

    Attributes:
        max_tokens: each hop reserves pages for this many tokens, and chooses no further ones.
        most_tokens: as many tokens as the session may have once it is opened again for more; 0: `max_tokens`.
        transient: whether hops also free the session when the client's stream ends.
        lease_ms: how long the hops keep the session without hearing of it; None: the configured lease.
        recorded_chain: the chain of the session's last turn; its hops keep what they hold of the session.
        only_chain: the chain to open the sessions on, without planning; None: one is planned.
        blocks: the sessions use only these blocks of the planned chain; None: all blocks.
        texts: for each session, the text that it is going to hold as far as it is known; hops may have cached the
            beginning, but the last token is always processed. None where the inputs are not token ids.
        cache_salt: hops share cached pages only between sessions with the same salt.
        standby: whether the sessions' hops have standbys; see `chain/standbys`.
        max_position: tokens that hops hold beyond this position no longer belong to the session's text.
        prompts: trained embeddings for each session; None: the sessions have none.
        adapter: the adapter with which the hops compute the sessions; None: the plain model.
        long_factors: whether the hops use the long factors of a longrope embedding.
        samplers: for each session, how its last hop chooses tokens; None where the last hop sends hidden states.
        keeps_outputs: whether hops keep what they send on, in case the next hop is lost.
        write_start: the sessions write to no position of their texts before this one, unless `Reservations.own` opens
            them again. So hops need no pages for what they share before it.
        fetched: hops to which the beginnings of the texts were copied just now; no later open resumes there.
        trace: the request's trace context, as headers; empty where the request is not traced.
    """

    max_tokens: int
    transient: bool
    most_tokens: int = 0
    lease_ms: int | None = None
    recorded_chain: common_pb2.Chain | None = None
    only_chain: common_pb2.Chain | None = None
    blocks: Span | None = None
    texts: Sequence[TextDigests] | None = None
    cache_salt: bytes = b""
    standby: StandbyMode = "auto"
    max_position: int | None = None
    prompts: Sequence[TrainedPrompts] | None = None
    adapter: AdapterVersion | None = None
    long_factors: bool = False
    samplers: Sequence[SamplerRecord] | None = None
    keeps_outputs: bool = True
    write_start: int = 0
    fetched: Sequence[common_pb2.Hop] = ()
    trace: Mapping[str, str] = field(default_factory=dict)

    @property
    def named_texts(self) -> Sequence[TextDigests]:
        """The texts whose pages sessions share; trained prompts change the keys and values of a text."""
        return () if self.prompts is not None or self.texts is None else self.texts

    @property
    def beginning_salt(self) -> bytes:
        """The salt of `chain/beginnings`, for what pages depend on apart from the text."""
        adapter = "" if self.adapter is None else self.adapter.digest
        return self.cache_salt + f"\0{adapter}\0{self.long_factors}\0{self.blocks}".encode()

    def may_fetch(self, num_sessions: int) -> bool:
        """Hops may get the beginning of the text from other servers: they hold nothing of a single session."""
        return num_sessions == 1 and self.recorded_chain is None

    def resumes(self, hop: common_pb2.Hop) -> bool:
        """The hop belongs to the recorded chain, so that it may hold tokens of the session."""
        return self.recorded_chain is not None and hop in self.recorded_chain.hops


@dataclass(slots=True)
class ChainBinding:
    """Sessions that are open on every hop of one chain, in one epoch. A recovery binds them to another chain.

    Attributes:
        identities: the sessions' identities; during a recovery, with the epoch in which hops are going to open them.
        max_step_tokens: the most tokens that every hop takes in one step.
        open_replies: for each hop, its answer for each session when the chain was opened.
        standbys: the servers that stand by for the chain's hops.
        write_start: the lowest position from which the sessions were opened again, to be written from there.
        rewinds: what the sessions have taken back, by session id; empty unless they are sequences of the library.
        renew_at_s: when the hops need fresh capabilities, by the event loop's clock.
        open_identities: the identities under which every hop of the chain last opened the sessions.
    """

    identities: tuple[SessionIdentity, ...]
    chain: common_pb2.Chain
    open_options: OpenOptions
    max_step_tokens: int
    open_replies: Sequence[Sequence[pb.Opened]] = ()
    standbys: StandbyHops = field(default_factory=StandbyHops)
    write_start: int = ALL_TOKENS
    rewinds: dict[bytes, Rewinds] = field(default_factory=dict)
    renew_at_s: float = math.inf
    open_identities: tuple[SessionIdentity, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.open_identities = self.identities

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of every session each hop already holds; every hop can continue from that position."""
        replies = [reply for on_hop in self.open_replies for reply in on_hop]
        position = min(reply.num_cached_tokens for reply in replies)
        if self.open_options.max_position is not None:
            position = min(position, self.open_options.max_position)
        # One hop's sliding window may have moved beyond the last token that another hop holds.
        return position if position >= max(reply.min_position for reply in replies) else 0

    def before_common_end(self, starts: Sequence[int]) -> dict[int, int]:
        """The hops that have to open the sessions again, by number, if each is written from its position in `starts`.

        They hold pages in common there.
        """
        ends = [max(reply.common_end for reply in on_hop) for on_hop in self.open_replies]
        return {number: start for number, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end}

    def raise_epoch(self, positions: Sequence[int]) -> None:
        """Begins the next epoch: late answers in this one do not count. Raises HopUnavailable if none is left.

        Args:
            positions: how many tokens of each session will not be computed anew.
        """
        session_ids = (identity.session_id for identity in self.identities)
        self.standbys.distrust(dict(zip(session_ids, positions, strict=True)))
        self.identities = tuple(identity.in_next_epoch() for identity in self.identities)

    def rebind(self, opened: "ChainBinding") -> None:
        """Binds the sessions to the chain of `opened`, whose hops have all opened them."""
        trusted = {hop.server_id: num_tokens for hop, num_tokens in self.standbys.trusted_on(opened.chain)}
        for hop, on_hop in zip(opened.chain.hops, opened.open_replies, strict=True):
            of_sessions = trusted.get(hop.server_id)
            for identity, reply in zip(opened.identities, on_hop, strict=True):
                if of_sessions is not None:
                    reply.num_cached_tokens = min(reply.num_cached_tokens, of_sessions.get(identity.session_id, 0))
                without_taken_back(reply, identity, self.rewinds)
        self.chain, self.max_step_tokens = opened.chain, opened.max_step_tokens
        self.open_replies, self.open_identities = opened.open_replies, opened.identities
        self.write_start = min(self.write_start, opened.write_start)
        self.renew_at_s = opened.renew_at_s

    def must_renew(self, now_s: float) -> bool:
        """The hops' capabilities have become old, and are to be renewed now."""
        if now_s < self.renew_at_s or self.identities != self.open_identities:
            return False
        self.renew_at_s = now_s + RENEWAL_S
        return True


def hop_salts(chain: common_pb2.Chain, salt: bytes, limits: ChainLimits) -> Mapping[str, bytes]:
    """The salts with which the digests of a text begin for each hop, by server id.

    A hop shares the text's pages with sessions of equal digests. There are no salts if servers of several numerics made
    the session's pages: no other session may get these.
    """
    if not limits.follows_numerics:
        return {hop.server_id: salt for hop in chain.hops}
    if chain.mixes_numerics:
        return {}
    numerics = [numerics_of(chain, hop).blocks for hop in chain.hops]
    return {hop.server_id: salt_behind(salt, numerics[: number + 1]) for number, hop in enumerate(chain.hops)}


class Attempts:
    """The attempts of one request to open its sessions.

    Attributes:
        too_full: ids of servers without enough free pages.
        lost: servers that did not answer, or refused.
        num_refused: how many attempts failed although every server answered and none was busy.
        without_adapter: the latest failure of a server that could not provide the session's adapter; None: all could.
    """

    def __init__(self, patience_s: float) -> None:
        self.too_full: set[str] = set()
        self.lost = LostServers(patience_s)
        self.num_refused = 0
        self.without_adapter: CorollaError | None = None

    def record(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]], now_s: float) -> None:
        """Records what hops answered in one attempt."""
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
        """Ids of the servers to leave out now. With `as_last_resort`, servers that may be back are not left out."""
        excluded = self.too_full.union(self.lost)
        return frozenset(excluded - self.lost.retryable(now_s) if as_last_resort else excluded)


def named_hops(chain: common_pb2.Chain) -> list[str]:
    """The hops of a chain as a trace names them."""
    return [f"{hop.address} {Span.from_message(hop.span)}" for hop in chain.hops]


class NotOpened(Exception):
    """Some hops of a chain did not open the sessions; the others may have."""

    def __init__(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]]) -> None:
        super().__init__()
        self.failures = failures

    @property
    def is_for_now(self) -> bool:
        """The hop refused only because it had too many sessions to open at that moment."""
        return any(isinstance(failure, QueueFull) for _, failure in self.failures)

    @property
    def are_full(self) -> bool:
        """The hops refused only because they had too few pages."""
        return all(isinstance(failure, OutOfPages) for _, failure in self.failures)


@dataclass(frozen=True, slots=True)
class Reservations:
    """Opens sessions on the hops of chains."""

    routes: Routes
    plane: DataPlane
    limits: ChainLimits
    _num_placed: Counter[str] = field(init=False, default_factory=Counter)

    async def reserve(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, until_s: float = math.inf
    ) -> ChainBinding:
        """Opens sessions, all of them on one chain.

        A hop that cannot be reached, or has no free pages, is left out for a while and another chain is tried. A hop
        that has too many sessions to open is asked again. Where every chain needs a hop that could not be reached, that
        hop is asked again and again: it may only be slow, or its connection broken. Attempts end at `until_s` of the
        event loop's clock, or after the patience of a recovery. Where servers have room only for what follows a
        beginning that another session has, its pages may be there soon, so the servers are asked a few times more.

        Raises:
            NoChain, OutOfPages, HopUnavailable, QueueFull: nothing stays allocated.
            InvalidRequest: the prompts are too large for a hop.
        """
        give_up_s = min(until_s, time_s() + self.limits.recovery_patience_s)
        for _ in range(_MAX_WAITS):
            try:
                return await self._reserve(identities, open_options, until_s, give_up_s)
            except OutOfPages as failure:
                pause_s = random.uniform(0, LONGEST_BUSY_PAUSE_S)
                if isinstance(failure, NoAdapterRoom) or time_s() + pause_s >= give_up_s:
                    raise
                num_tokens = open_options.max_tokens * len(identities)
                if not self.routes.needs_text_in_common(num_tokens, self.held(open_options)):
                    raise
            await asyncio.sleep(pause_s)
        return await self._reserve(identities, open_options, until_s, give_up_s)

    async def _reserve(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, until_s: float, give_up_s: float
    ) -> ChainBinding:
        """Opens sessions as `reserve` does, without waiting for pages of others."""
        if trace := trace_headers():
            open_options = replace(open_options, trace=trace)
        attempts = Attempts(self.limits.recovery_patience_s)
        held = self.held(open_options)
        while True:
            try:
                chain = open_options.only_chain or await self._choose(
                    len(identities), open_options, held, attempts, give_up_s, until_s
                )
            except (NoChain, OutOfPages):
                if attempts.without_adapter is not None:
                    raise attempts.without_adapter from None
                raise
            if any(hop.server_id in attempts.lost for hop in chain.hops):
                # A hop may have opened the sessions although its answer was lost. A new connection lets that be undone.
                await asyncio.gather(*(self.plane.connect(hop.address) for hop in chain.hops), return_exceptions=True)
                self._undo(identities, open_options, chain)
            fetched = await self._fetch(identities, open_options, chain, held, until_s)
            try:
                return await self._open_evenly(identities, replace(open_options, fetched=fetched), chain)
            except NotOpened as refused:
                failures, is_for_now = refused.failures, refused.is_for_now
            self._undo(identities, open_options, chain)
            attempts.record(failures, time_s())
            for hop, failure in failures:
                self.routes.on_open_refused(hop.server_id, failure)
            hard = [failure for _, failure in failures if not isinstance(failure, _AVOIDABLE)]
            has_had_enough = attempts.num_refused == _MAX_REFUSALS or time_s() >= give_up_s
            if hard or has_had_enough or open_options.only_chain is not None:
                raise (hard or [failure for _, failure in failures])[0]
            reason = getattr(failures[0][1], "reason", "INTERNAL")
            log.warning("could not open a chain; trying another one", extra={"reason": reason})
            if is_for_now:
                await asyncio.sleep(random.uniform(0, LONGEST_BUSY_PAUSE_S))

    def held(self, open_options: OpenOptions) -> Mapping[str, int]:
        """How many of the first text's tokens servers may hold, by id; empty if that does not matter."""
        texts = open_options.named_texts
        if not texts or open_options.only_chain is not None:
            return {}
        return self.routes.beginnings.held(texts[0], open_options.beginning_salt)

    async def _fetch(
        self,
        identities: Sequence[SessionIdentity],
        open_options: OpenOptions,
        chain: common_pb2.Chain,
        held: Mapping[str, int],
        until_s: float,
    ) -> list[common_pb2.Hop]:
        """Copies what other servers hold of a session's text to the hops of a chain. Returns those that got some."""
        if not held or not open_options.may_fetch(len(identities)) or chain.mixes_numerics:
            return []
        (text,) = open_options.named_texts
        fetches = Fetches(self.routes, self.plane)

        async def fetch(hop: common_pb2.Hop) -> bool:
            async def open_on(server: common_pb2.Hop, num_tokens: int, transfer_id: bytes) -> pb.Opened:
                # A server never finds the last token of a text, since it has to compute something.
                most = open_options.max_tokens if transfer_id else min(num_tokens + 1, len(text))
                options, transfer_ids = replace(open_options, max_tokens=most), [transfer_id] if transfer_id else []
                return (await self.open_copy(server, hop, identities, options, chain, transfer_ids))[0]

            return await fetches.fetch(hop, chain, identities[0], held, open_on, until_s)

        have_some = await asyncio.gather(*map(fetch, chain.hops))
        return [hop for hop, has_some in zip(chain.hops, have_some, strict=True) if has_some]

    async def open(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain
    ) -> ChainBinding:
        """Opens sessions on exactly this chain.

        Raises NotOpened where a hop failed: the caller then has to free the sessions on the hops that did open them.
        """
        starts = dict.fromkeys(range(len(chain.hops)), open_options.write_start)
        with spans.span("open") as span:
            if span.is_sampled:
                span.note(hops=named_hops(chain), epoch=identities[0].epoch)
            try:
                opened = await self._open_hops(identities, open_options, chain, starts)
            except asyncio.CancelledError:
                self._undo(identities, open_options, chain)
                raise
        # The hops find pages of the prompt from now on, at the latest when they have computed it.
        self.remember(chain, open_options, *open_options.named_texts)
        return ChainBinding(
            tuple(identities),
            chain,
            # What is fetched counts once: a server that comes back is empty, or holds tokens that were taken back.
            replace(open_options, fetched=()),
            # A hop that is gone already takes no step.
            min(filter(None, (self.plane.welcome(hop.address).max_tokens_per_frame for hop in chain.hops)), default=1),
            open_replies=list(opened.values()),
            standbys=StandbyHops(num_placed=self._num_placed),
            renew_at_s=time_s() + RENEWAL_S,
        )

    async def _open_evenly(
        self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain
    ) -> ChainBinding:
        """Opens sessions so that every hop may write from where the shortest beginning that a hop holds ends."""
        binding = await self.open(identities, open_options, chain)
        while lower := binding.before_common_end([binding.num_cached_tokens] * len(chain.hops)):
            try:
                await self.own(binding, lower)
            except asyncio.CancelledError:
                self._undo(identities, open_options, chain)
                raise
            except NotOpened as refused:
                # Replicas of the hops that hold least may hold as much as those that have no room for copies.
                poorer = [hop for number, hop in enumerate(chain.hops) if number not in lower]
                if not refused.are_full or not any(map(self.routes.has_replica, poorer)):
                    raise
                raise NotOpened([(hop, refused.failures[0][1]) for hop in poorer]) from None
        return binding

    async def own(self, binding: ChainBinding, starts: Mapping[int, int]) -> None:
        """Opens sessions again, in their epoch, on hops where they have to write to pages that they hold in common.

        Args:
            starts: the position from which each hop will be written, by the number of the hop.

        Raises:
            NotOpened: a hop has no room for pages of their own.
        """
        chain = binding.chain
        self.truncate(binding.identities, [chain.hops[number] for number in starts])
        options = replace(binding.open_options, recorded_chain=chain)
        replies = await self._open_hops(binding.identities, options, chain, starts)
        binding.open_replies = [replies.get(number, each) for number, each in enumerate(binding.open_replies)]
        binding.write_start = min(binding.write_start, *starts.values())
        if still := binding.before_common_end([starts.get(number, ALL_TOKENS) for number in range(len(chain.hops))]):
            hops = [chain.hops[number] for number in still]
            raise NotOpened([(hop, HopUnavailable("a hop still holds pages in common", hop.address)) for hop in hops])

    async def _open_hops(
        self,
        identities: Sequence[SessionIdentity],
        open_options: OpenOptions,
        chain: common_pb2.Chain,
        starts: Mapping[int, int],
    ) -> dict[int, list[pb.Opened]]:
        """Opens sessions on those hops of a chain whose numbers `starts` maps to the position of their first write.

        Returns the answers of each hop, by its number.
        """
        last = len(chain.hops) - 1
        salts = hop_salts(chain, open_options.cache_salt, self.limits)
        opens = [
            self._open_on(
                chain.hops[number],
                identities,
                open_options,
                salts.get(chain.hops[number].server_id),
                write_start=start,
                keep_activations=open_options.keeps_outputs and number < last,
                samples=number == last,
            )
            for number, start in starts.items()
        ]
        answers = dict(zip(starts, await asyncio.gather(*opens), strict=True))
        failures = [
            (chain.hops[number], answer)
            for number, on_hop in answers.items()
            for answer in on_hop
            if isinstance(answer, BaseException)
        ]
        if failures:
            raise NotOpened(failures)
        return {
            number: [answer for answer in on_hop if not isinstance(answer, BaseException)]
            for number, on_hop in answers.items()
        }

    async def open_scratch(
        self, identity: SessionIdentity, open_options: OpenOptions, chain: common_pb2.Chain, numbers: Iterable[int]
    ) -> int:
        """Opens a session on the hops of a chain with these numbers.

        Returns:
            How many tokens each of them holds, so that it can continue from there.

        Raises:
            NotOpened: a hop failed; the others may have opened the session.
        """
        starts = dict.fromkeys(numbers, open_options.write_start)
        replies = [reply for (reply,) in (await self._open_hops([identity], open_options, chain, starts)).values()]
        position = min(reply.num_cached_tokens for reply in replies)
        return position if position >= max(reply.min_position for reply in replies) else 0

    async def open_copy(
        self,
        server: common_pb2.Hop,
        hop: common_pb2.Hop,
        identities: Sequence[SessionIdentity],
        open_options: OpenOptions,
        chain: common_pb2.Chain,
        transfer_ids: Sequence[bytes] = (),
    ) -> list[pb.Opened]:
        """Opens the sessions of a chain on a server that has, or is going to have, what one of its hops holds of them.

        Args:
            transfer_ids: the ids of the transfers that fill the sessions there; empty: it gives what it has cached.

        Raises:
            CorollaError: the server refused a session; it may hold others.
        """
        opened = await self._open_on(
            server, identities, replace(open_options, transient=True),
            hop_salts(chain, open_options.cache_salt, self.limits).get(hop.server_id),
            write_start=0 if transfer_ids else ALL_TOKENS, transfer_ids=transfer_ids, only_cached=not transfer_ids,
        )  # fmt: skip
        for each in opened:
            if isinstance(each, BaseException):
                raise each
        return [each for each in opened if not isinstance(each, BaseException)]

    def remember(
        self,
        chain: common_pb2.Chain,
        open_options: OpenOptions,
        *texts: TextDigests,
        standbys: Sequence[common_pb2.Hop] = (),
    ) -> None:
        """Notes that the chain's hops hold texts of sessions, so that texts with the same beginnings are led there.

        Servers that share no pages do not count.

        Args:
            standbys: servers that hold the texts, too.
        """
        if not chain.mixes_numerics:
            holders = (*chain.hops, *standbys)
            server_ids = [hop.server_id for hop in holders if self.plane.welcome(hop.address).page_tokens]
            for text in texts:
                self.routes.beginnings.remember(text, open_options.beginning_salt, server_ids)

    def truncate(
        self,
        identities: Sequence[SessionIdentity],
        hops: Iterable[common_pb2.Hop],
        positions: Mapping[bytes, int] | None = None,
    ) -> None:
        """Makes hops forget the tokens from a position of each session on; an open that follows finds those before.

        Without positions, an open is taken back: the hops keep what they hold of the sessions.
        """
        for hop, each in product(hops, identities):
            position = ALL_TOKENS if positions is None else positions.get(each.session_id, 0)
            truncate = pb.Truncate(
                session_id=each.session_id, epoch=each.epoch, position=position, idle=positions is None
            )
            self.plane.notify(hop.address, truncate)

    def give_back(self, identities: Sequence[SessionIdentity], hops: Sequence[common_pb2.Hop]) -> None:
        """Frees sessions on some hops. A hop that has opened a session in a later epoch keeps it."""
        for identity in identities:
            self.plane.close_session(hops, identity)

    async def _choose(
        self,
        num_sessions: int,
        open_options: OpenOptions,
        held: Mapping[str, int],
        attempts: Attempts,
        give_up_s: float,
        until_s: float,
    ) -> common_pb2.Chain:
        """A chain whose servers may open the sessions.

        Waits for one while a lost server may still come back, or servers that join say that they are ready in time.
        """
        first_failure: CorollaError | None = None

        async def plan(now_s: float, *, as_last_resort: bool) -> common_pb2.Chain:
            excluded_ids = attempts.excluded(now_s, as_last_resort=as_last_resort)
            num_tokens = open_options.max_tokens * num_sessions
            if (recorded := open_options.recorded_chain) is not None:
                # The hops of the last turn that still exist stay in the chain, with what they hold of the session.
                chain = self.routes.replan_recorded(recorded, excluded_ids, num_tokens=num_tokens, held=held)
                if chain is not None:
                    return chain
            texts = open_options.named_texts
            most_tokens = open_options.most_tokens or open_options.max_tokens
            chain = await self.routes.plan(
                num_tokens=num_tokens,
                blocks=open_options.blocks,
                excluded_ids=excluded_ids,
                are_some_full=bool(attempts.too_full),
                # Later plans use the pushed placement: otherwise all waiting requests would poll the router.
                asks_router=first_failure is None,
                held=held,
                may_fetch=open_options.may_fetch(num_sessions),
                new_tokens=most_tokens - len(texts[0]) if texts else math.inf,
            )
            return chain if recorded is None else self.routes.continued(recorded, chain)

        while True:
            now_s = time_s()
            try:
                return await plan(now_s, as_last_resort=False)
            except (NoChain, RouterUnavailable, StoreUnavailable) as failure:
                first_failure = first_failure or failure
                with contextlib.suppress(NoChain, RouterUnavailable, StoreUnavailable):
                    return await plan(now_s, as_last_resort=True)
                ready_in_s = self.routes.ready_in_s(attempts.lost)
                waits_until_s = waits_until(give_up_s, ready_in_s, now_s, until_s)
                may_succeed = (
                    attempts.lost.may_return(now_s) or self.routes.is_settling or 0 < ready_in_s < waits_until_s - now_s
                )
                if time_s() >= waits_until_s or not may_succeed:
                    raise first_failure from None
            await self.routes.wait_for_update(waits_until_s)

    async def _open_on(
        self,
        hop: common_pb2.Hop,
        identities: Sequence[SessionIdentity],
        open_options: OpenOptions,
        salt: bytes | None,
        *,
        write_start: int,
        keep_activations: bool = False,
        samples: bool = False,
        transfer_ids: Sequence[bytes] = (),
        only_cached: bool = False,
    ) -> list[pb.Opened | BaseException]:
        """Opens sessions on one server, which they write to from `write_start` on.

        `salt` is the salt of their texts' digests there; None: they get no names.
        """
        texts = open_options.named_texts
        # Prompts may be large, so the send queue holds those of only one session at a time.
        turn = contextlib.nullcontext() if open_options.prompts is None else asyncio.Lock()

        async def open_one(number: int) -> pb.Opened:
            async with turn:
                welcome = await self.plane.connect(hop.address)
                if not Span.from_message(welcome.span).covers(Span.from_message(hop.span)):
                    raise HopUnavailable("another server with other blocks now has the address of a hop", hop.address)
                request = pb.Open(
                    session_id=identities[number].session_id,
                    epoch=identities[number].epoch,
                    tenant=identities[number].tenant,
                    resume=bool(transfer_ids) or hop in open_options.fetched or open_options.resumes(hop),
                    max_tokens=open_options.max_tokens,
                    blocks=hop.span,
                    lease_ms=open_options.lease_ms or self.limits.lease_ms,
                    transient=open_options.transient,
                    keep_activations=keep_activations,
                    long_factors=open_options.long_factors,
                    standby_transfer_id=transfer_ids[number] if transfer_ids else b"",
                    only_cached=only_cached,
                )
                if open_options.adapter is not None:
                    request.adapter.CopyFrom(open_options.adapter.to_message())
                if open_options.trace:
                    trace = open_options.trace
                    request.trace.parent, request.trace.state = trace[PARENT_HEADER], trace.get(STATE_HEADER, "")
                if texts and salt is not None and welcome.page_tokens:
                    num_tokens = min(len(texts[number]), open_options.max_tokens)
                    request.text.CopyFrom(texts[number].of(welcome.page_tokens, salt, num_tokens))
                    request.write_start = min(write_start, request.text.num_tokens)
                if samples and open_options.samplers is not None:
                    request.sampler.CopyFrom(open_options.samplers[number].message(open_options.max_tokens))
                return await self.plane.open(hop.address, request, _describe_prompts(request, number, open_options))

        if len(identities) == 1:
            # Nearly all opens are of one session, and another task for each hop would cost as much as the rest.
            try:
                return [await open_one(0)]
            except Exception as failure:
                return [failure]
        return await asyncio.gather(*map(open_one, range(len(identities))), return_exceptions=True)

    def _undo(self, identities: Sequence[SessionIdentity], open_options: OpenOptions, chain: common_pb2.Chain) -> None:
        """Undoes an open that failed in part: frees the sessions on new hops; hops of the last turn keep theirs."""
        self.give_back(identities, [hop for hop in chain.hops if not open_options.resumes(hop)])
        self.truncate(identities, filter(open_options.resumes, chain.hops))


def _describe_prompts(request: pb.Open, number: int, open_options: OpenOptions) -> Buffer:
    """The payload with the trained prompts for the blocks of an open; their description is put into the request."""
    if open_options.prompts is None:
        return b""
    first = open_options.blocks.start if open_options.blocks is not None else 0
    start, end = request.blocks.start, request.blocks.end
    description, payload = open_options.prompts[number](start - first, end - first)
    if len(payload) > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            "block_prompts",
            f"the prompts of blocks {start}:{end} take {len(payload) >> 20} MiB; a hop takes at most "
            f"{MAX_PROMPT_BYTES >> 20} MiB",
        )
    request.block_prompts.CopyFrom(description)
    return payload
