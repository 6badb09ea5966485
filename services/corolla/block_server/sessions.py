"""The sessions that this hop holds: epochs, owners, leases and reserved pages. Pure: time is passed in."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Final, Generic

from corolla.block_server.beginnings import AnnouncedBeginnings
from corolla.block_server.hop_session import AnyCache, HopSession, OpenRequest, SessionEvent, SessionState
from corolla.block_server.page_guarantees import PageGuarantees
from corolla.cache.pages import PagePool, too_few_pages
from corolla.cache.prefixes import PrefixKey, salt_of
from corolla.chassis.errors import HopLeaving, HopSessionLost, OutOfPages, PositionGap, StaleEpoch
from corolla.wire.span import Span

if TYPE_CHECKING:
    from corolla.compute.prompts import BlockPrompts
    from corolla.v1 import blocks_pb2 as pb


_MOST_OF_STANDBYS: Final = 0.5
"""The largest share of all pages that standbys hold."""
_NUM_ENDED: Final = 4096
"""How many ended sessions are remembered, since some of their steps may still arrive."""


@dataclass(eq=False, repr=False)
class SessionTable(Generic[AnyCache]):
    """All sessions of the hop.

    Invariants: the pages that are promised to sessions and the pool's available pages add up to all pages. While
    guarantees stay the same, the available pages and those of idle sessions are together at least as many as those
    kept for tenants with guarantees. So a tenant always gets the pages that it is guaranteed.

    Args:
        max_prompt_bytes: the most bytes of the trained prompts of all sessions together.
        on_forget: drops what is kept elsewhere of a session whose tokens are all forgotten, given the session's id.

    Attributes:
        guarantees: the guaranteed pages of tenants.
        announced: the beginnings of texts that heartbeats announce.
        is_draining: whether new sessions are refused; held sessions may be reopened until they leave.
        num_standby_tokens: how many tokens standbys held when their sessions were opened here to go on.
    """

    pool: PagePool
    new_cache: Callable[[], AnyCache]
    _: KW_ONLY
    max_prompt_bytes: int = 0
    on_forget: Callable[[bytes], None] = lambda session_id: None
    guarantees: PageGuarantees = field(init=False, default_factory=PageGuarantees)
    announced: AnnouncedBeginnings = field(init=False)
    # Sessions are in order of use, least recently used first.
    _sessions: dict[bytes, HopSession[AnyCache]] = field(init=False, default_factory=dict)
    _versions: Iterator[int] = field(init=False, default_factory=lambda: itertools.count(1))
    # Ended sessions are in order of their end, oldest first.
    _ended_epochs: dict[bytes, int] = field(init=False, default_factory=dict)
    num_evicted: int = field(init=False, default=0)
    num_standby_tokens: int = field(init=False, default=0)
    is_draining: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.announced = AnnouncedBeginnings(self.new_cache().has_beginning)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[HopSession[AnyCache]]:
        return iter(self._sessions.values())

    @property
    def num_available_pages(self) -> int:
        """How many pages a new session could get: the pool's available pages, and pages of idle sessions."""
        num_idle = sum(session.num_pages for session in self if session.is_idle)
        return self.pool.num_available + num_idle + self.pool.num_uncharged

    @property
    def num_running(self) -> int:
        """How many sessions are in mid-answer."""
        return sum(not session.is_idle for session in self)

    @property
    def num_running_tokens(self) -> int:
        """How many tokens the sessions hold that are in mid-answer."""
        return sum(session.cache.num_tokens for session in self if not session.is_idle)

    @property
    def num_kept_pages(self) -> int:
        """How many of the available pages are kept for tenants that hold fewer pages than they are guaranteed."""
        return self.guarantees.num_kept(self._held_pages()) if self.guarantees else 0

    @property
    def max_session_tokens(self) -> int:
        """The number of tokens of the longest session that any tenant could open now."""
        return self.new_cache().max_tokens_within(max(0, self.num_available_pages - self.num_kept_pages))

    def pages_of_any(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens take, in one session or divided by whole pages among several sessions.

        The pages that a session holds apart from those of its tokens are counted once.
        """
        cache = self.new_cache()
        return len(cache.tables) * self.pool.pages_for(num_tokens) + cache.num_fixed_pages

    def tenant_tokens(self, rows: Iterable["pb.StepRow"]) -> Mapping[str, int]:
        """Maps each tenant to the number of its tokens in these rows; unknown sessions count under the empty name."""
        tokens: dict[str, int] = {}
        for row in rows:
            session = self._sessions.get(row.session_id)
            tenant = "" if session is None else session.request.tenant
            tokens[tenant] = tokens.get(tenant, 0) + row.num_tokens
        return tokens

    def make_room(self, num_tokens: int) -> None:
        """Evicts idle sessions until `num_tokens` tokens that belong to no session have room.

        Raises:
            OutOfPages: evicting all idle sessions would not give enough room; so none was evicted.
        """
        self._make_room(self.new_cache().worst_case(num_tokens))

    def get(self, session_id: bytes) -> HopSession[AnyCache] | None:
        return self._sessions.get(session_id)

    def open(self, request: OpenRequest, now_s: float) -> HopSession[AnyCache]:
        """Opens a session, or reopens it with a higher epoch.

        Raises:
            HopLeaving: another server has the session or is getting it, or this server drains and does not hold it.
            HopSessionLost, StaleEpoch: see `HopSession.check_open`.
            OutOfPages: the worst case, or the trained prompts, do not fit. A session that was held stays as it was.
        """
        if request.only_cached:
            # No conversation is evicted for tokens that are not here.
            found = self.new_cache().num_found_tokens(request.text, request.max_tokens)
            request = replace(request, max_tokens=found)
        return self._begin(request, SessionEvent.OPENED, now_s)

    def _begin(self, request: OpenRequest, event: SessionEvent, now_s: float) -> HopSession[AnyCache]:
        session = self._held_for(request, may_drain=True)
        cache = self.new_cache() if session is None else session.cache
        is_kept = (
            session is not None
            and request.resume
            and session.state is not SessionState.ARRIVING
            and session.request.agrees_with(request)
        )
        self._make_room_for(request, cache, is_kept=is_kept)
        if session is None:
            session = HopSession(request, cache)
        elif not is_kept:
            cache.clear()
            session.applied_step_id = 0
            self.on_forget(request.session_id)
        elif cache.num_tokens > request.max_tokens:
            cache.truncate(cache.nearest_position(request.max_tokens))
        if session.state is SessionState.STANDBY:
            if event is SessionEvent.OPENED:
                self._forget_unsent(session)
            self.num_standby_tokens += cache.num_tokens
        was_empty = not cache.num_tokens
        is_copied = event is SessionEvent.OFFERED
        cache.allocate(request.max_tokens, request.text, request.write_start, is_copied=is_copied)
        if session.request.client_id != request.client_id:
            # Each client counts its steps by itself.
            session.newest_step_id = session.applied_step_id = session.rewound_step_id = 0
        session.newest_ring_position, session.ring = -1, None
        # What the prefix cache has of the text is settled; what the session held before may be more than its answer.
        session.num_settled_tokens = cache.num_tokens if was_empty else 0
        self._ended_epochs.pop(request.session_id, None)
        return self._entered(session, request, event, now_s)

    def _held_for(self, request: OpenRequest, *, may_drain: bool) -> HopSession[AnyCache] | None:
        """The session that a request opens again; None: it is a new one.

        Args:
            may_drain: whether held sessions may be opened while this server drains.
        """
        session = self._sessions.get(request.session_id)
        if session is not None:
            session.check_open(request)
        if self.is_draining and (session is None or not may_drain):
            raise HopLeaving("a block server takes no new sessions")
        if request.prompts is not None:
            self._check_prompts(request.prompts, except_of=request.session_id)
        return session

    def _entered(
        self, session: HopSession[AnyCache], request: OpenRequest, event: SessionEvent, now_s: float
    ) -> HopSession[AnyCache]:
        session.request = request if request.prompts is None else replace(request, prompts=request.prompts.copy())
        session.version = next(self._versions)
        session.apply(event)
        self._touch(session, now_s)
        return session

    def open_standby(self, request: OpenRequest, now_s: float) -> HopSession[AnyCache]:
        """Makes the session here the standby of another hop, or names it as that again in a later epoch.

        It begins with what the prefix cache has of its text, holds that in common, and reserves no pages ahead.

        Raises:
            HopLeaving, HopSessionLost, StaleEpoch, OutOfPages: see `open`.
        """
        session = self._held_for(request, may_drain=False)
        is_kept = session is not None and session.state is SessionState.STANDBY and request.resume
        if session is not None and not (is_kept and session.request.agrees_with(request)):
            self._free(session)
            session = None
        if session is None:
            session = HopSession(request, self.new_cache())
            write_start = 0 if request.text is None else request.text.num_tokens
            session.cache.allocate(None, request.text, write_start, is_copied=True)
        session.transfer_id = request.standby_transfer_id
        return self._entered(session, request, SessionEvent.NAMED_STANDBY, now_s)

    def grow_standby(self, session: HopSession[AnyCache], start: int, end: int) -> None:
        """Makes room for the tokens `[start, end)` of a standby, behind those that it has or in their place.

        Raises:
            OutOfPages: sessions hold the pages, or other standbys hold as many as they all may. None of these goes: its
                answer would need another standby.
        """
        cache, pool = session.cache, self.pool
        num_more = cache.worst_case(end) - cache.num_pages - cache.num_common_pages
        num_held = sum(each.num_pages for each in self if each.state is SessionState.STANDBY)
        num_left = min(pool.num_available, int(_MOST_OF_STANDBYS * pool.num_pages) - num_held)
        if num_more > num_left:
            raise too_few_pages(num_more, max(0, num_left))
        cache.own_from(start)
        if num_more > 0:
            cache.reserve(end)

    def _forget_unsent(self, session: HopSession[AnyCache]) -> None:
        """Forgets what a standby cannot use: tokens whose windows or recurrent states it lacks."""
        cache = session.cache
        for group, token in session.unsent_before.items():
            cache.tables[group].forget_before(min(token, cache.num_tokens))
        session.unsent_before.clear()
        position = cache.nearest_position(cache.num_tokens)
        if position:
            cache.truncate(position)
        else:
            cache.clear()

    def receive(self, request: OpenRequest, transfer_id: bytes, now_s: float) -> HopSession[AnyCache]:
        """Makes room for a session that another server hands over, or continues a handover whose stream broke.

        `transfer_id` is random and only the sender knows it, so no other peer can send the session's parts.

        Raises:
            HopLeaving, HopSessionLost, OutOfPages: see `open`; HopLeaving in any case if this server drains.
            StaleEpoch: the session's client opened it here in this epoch or a later one, or for other blocks.
        """
        if self.is_draining:
            raise HopLeaving("a block server takes no new sessions")
        session = self._sessions.get(request.session_id)
        if session is not None and session.request.tenant == request.tenant:
            if session.request.epoch == request.epoch and session.request.blocks != request.blocks:
                raise StaleEpoch("the session was opened on this server with other blocks")
            if session.is_filled_by(request.epoch, transfer_id):
                if session.state is SessionState.STANDBY:
                    return self._begin(replace(request, resume=True), SessionEvent.OFFERED, now_s)
                self._touch(session, now_s)
                return session
            if session.is_unclaimed and session.request.epoch <= request.epoch:
                self._free(session)
        session = self._begin(request, SessionEvent.OFFERED, now_s)
        session.transfer_id = transfer_id
        return session

    def get_arriving(self, session_id: bytes, epoch: int, transfer_id: bytes, now_s: float) -> HopSession[AnyCache]:
        """The session that this handover fills. Raises HopSessionLost if it fills no session."""
        session = self._sessions.get(session_id)
        if session is None or not session.is_filled_by(epoch, transfer_id):
            raise HopSessionLost("the session is not being handed over to this server")
        # The order of use does not change: this runs in the compute thread, while the event loop may iterate over it.
        session.last_used_s = now_s
        return session

    def arrived(self, session: HopSession[AnyCache], *, is_idle: bool) -> None:
        """Notes that the whole session has arrived. An idle session then keeps only the pages that it needs."""
        session.apply(SessionEvent.ARRIVED_PARKED if is_idle else SessionEvent.ARRIVED)
        if is_idle:
            session.cache.reserve(session.cache.num_tokens)

    def note_step(self, session_id: bytes, epoch: int, client_id: bytes, step_id: int) -> bool:
        """Notes a step, and returns whether it comes for the first time; see `HopSession.note_step`."""
        session = self._sessions.get(session_id)
        return session is None or session.note_step(epoch, client_id, step_id)

    def takes_ring_step(self, session_id: bytes, epoch: int, client_id: bytes, position: int) -> bool:
        """Notes a step of a ring. Returns whether the step is new and its client has not ended the session or its turn.

        See `HopSession.note_ring_step`.
        """
        session = self._sessions.get(session_id)
        if session is not None and not session.note_ring_step(epoch, client_id, position):
            return False
        return not self.has_ended(session_id, epoch, client_id)

    def has_ended(self, session_id: bytes, epoch: int, client_id: bytes) -> bool:
        """This client has ended the session or its turn, so that rows still on the ring are not needed."""
        session = self._sessions.get(session_id)
        if session is None:
            return self._ended_epochs.get(session_id, 0) >= epoch
        request = session.request
        if request.client_id != client_id:
            return False  # the client has to learn that another client service has the session now
        return request.epoch > epoch or (request.epoch == epoch and session.has_turn_ended)

    def for_step(
        self,
        session_id: bytes,
        epoch: int,
        client_id: bytes,
        position: int,
        num_tokens: int,
        blocks: Span,
        now_s: float,
        forked: AnyCache | None = None,
        *,
        computes: bool = True,
        num_drafts: int = 0,
        step_id: int = 0,
    ) -> HopSession[AnyCache]:
        """Checks a step and returns its session.

        Args:
            forked: becomes the session's cache, if given.
            num_drafts: how many of the last tokens are drafts, which the answer may not keep.
            computes: whether the step is computed, and so needs the earlier tokens.
            step_id: the id of a step of the session's client; 0 for one of a ring.

        Raises:
            HopLeaving, HopSessionLost, StaleEpoch, PositionGap, OutOfPages: the step must not be computed.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise HopSessionLost("the session is not held here")
        session.check_step(epoch, client_id, blocks)
        cache = session.cache if forked is None else forked
        if position > cache.num_tokens:
            raise PositionGap("the hop holds fewer tokens than the step assumes", cache.num_tokens)
        if computes and not cache.can_continue_from(position):
            raise PositionGap(
                "the hop no longer holds all tokens that this step needs", cache.nearest_position(position)
            )
        end, num_reserved = position + num_tokens, session.cache.num_reserved_tokens
        if end > num_reserved and self.pool.pages_for(end) > self.pool.pages_for(num_reserved):
            raise OutOfPages("the step goes beyond the pages reserved for its session")
        if forked is not None or position < cache.num_tokens:
            session.rewound_step_id = max(session.rewound_step_id, step_id)
        if forked is not None:
            forked.truncate(position)
            session.cache.adopt(forked)
        elif computes:
            # A step that fails then leaves no tokens that it has taken back.
            session.cache.own_from(position)
            session.cache.truncate(position)
        if computes:
            session.num_settled_tokens = end - num_drafts
            session.applied_step_id = max(session.applied_step_id, step_id)
        self._touch(session, now_s)
        return session

    def fork(self, source_id: bytes, session_id: bytes, client_id: bytes, blocks: Span) -> AnyCache:
        """Returns a copy of a session's cache for another session of the same client.

        Raises:
            HopSessionLost: the source is not held here, belongs to another client or tenant, or uses other blocks,
                another adapter or other factors; or only one of the two sessions has trained prompts.
        """
        session, taker = self._sessions.get(source_id), self._sessions.get(session_id)
        if session is None or session.request.client_id != client_id or session.request.blocks != blocks:
            raise HopSessionLost("the session to fork from is not held here")
        if taker is not None and not session.request.agrees_with(taker.request):
            raise HopSessionLost("sessions with other adapters, factors or trained prompts do not share tokens")
        if taker is not None and session.request.tenant != taker.request.tenant:
            raise HopSessionLost("sessions of other tenants do not share tokens")
        return session.cache.fork()

    def truncate(self, session_id: bytes, epoch: int, position: int, *, idle: bool) -> None:
        """Forgets the tokens from `position` on, and gives back all pages that the earlier tokens do not need.

        A request of an earlier epoch changes nothing.

        Args:
            idle: whether the turn is over, so that the session may be evicted; False does not begin a turn again.
        """
        # During a recovery, a turn may end in a later epoch than the one in which the session was opened here.
        session = self._sessions.get(session_id)
        if session is None or session.request.epoch > epoch:
            return
        if position < session.cache.num_tokens:
            session.cache.truncate(session.cache.nearest_position(position))
        session.cache.reserve(session.cache.num_tokens)
        if idle:
            session.apply(SessionEvent.TURN_ENDED)

    def set_page_hashes(
        self, session_id: bytes, epoch: int, hashes: Sequence[bytes], beginnings: Iterable["pb.Beginning"] = ()
    ) -> None:
        """Notes the digests of the session's first pages, unless it has another epoch or trained prompts.

        Args:
            beginnings: those of the session's text that heartbeats are to announce.
        """
        session = self._sessions.get(session_id)
        if session is not None and session.request.epoch == epoch and session.request.prompts is None:
            request = session.request
            salt = salt_of(request.tenant, request.blocks, request.adapter_version, long_factors=request.long_factors)
            session.cache.set_page_hashes(salt, hashes)
            for each in beginnings:
                if last_page := hashes[: each.num_tokens // self.pool.page_tokens][-1:]:
                    self.announced.note(each.digest, PrefixKey(salt, last_page[0], 0))

    def end(self, session_id: bytes, epoch: int) -> None:
        """Frees the session, unless it was reopened in a later epoch."""
        session = self._sessions.get(session_id)
        if session is not None and session.request.epoch <= epoch:
            self._free(session)
        self._ended_epochs[session_id] = max(epoch, self._ended_epochs.pop(session_id, 0))
        while len(self._ended_epochs) > _NUM_ENDED:
            del self._ended_epochs[next(iter(self._ended_epochs))]

    def in_version(self, session_id: bytes, version: int) -> HopSession[AnyCache]:
        """Returns the session in this version. Raises HopSessionLost if it has ended or has another version."""
        session = self._sessions.get(session_id)
        if session is None or session.version != version:
            raise HopSessionLost("the session ended, or continues in another epoch")
        return session

    def cancel_leaving(self, session_id: bytes, version: int) -> None:
        """Lets a session stay whose handover failed, if it is still leaving in this version."""
        session = self._sessions.get(session_id)
        if session is not None and session.version == version and session.is_leaving:
            session.apply(SessionEvent.STAYS)

    def end_stream(self, client_id: bytes, stream: int | None = None) -> int:
        """Frees the transient sessions of a client's stream, or of all its streams if None. Returns their number.

        Other sessions keep the pages of their tokens. The client may have dropped this hop from its chain, or died, but
        only the router knows which sessions will not be opened again.
        """
        mine = [
            session
            for session in self
            if session.request.client_id == client_id and stream in (None, session.request.stream)
        ]
        for session in mine:
            if session.request.transient:
                self._free(session)
                continue
            session.apply(SessionEvent.STREAM_ENDED)
            if session.is_idle:
                session.cache.reserve(session.cache.num_tokens)
        return sum(1 for session in mine if session.request.transient)

    def expire(self, now_s: float) -> int:
        """Frees the sessions whose lease has run out. Returns how many."""
        gone = [session for session in self if session.lease_deadline_s < now_s]
        for session in gone:
            self._free(session)
        return len(gone)

    def _check_prompts(self, prompts: "BlockPrompts", *, except_of: bytes) -> None:
        others = (each.request for each in self if each.request.session_id != except_of)
        if prompts.nbytes + sum(each.prompts.nbytes for each in others if each.prompts) > self.max_prompt_bytes:
            raise OutOfPages("the trained prompts of all sessions do not fit into the memory for them")

    def _held_pages(self) -> Counter[str]:
        """Maps each tenant to the pages of its sessions that are not idle, so that they cannot be evicted.

        A page that they hold in common counts once.
        """
        held = Counter(self.pool.num_charged)
        for session in self:
            if not session.is_idle:
                held[session.request.tenant] += session.num_pages
        return held

    def _make_room_for(self, request: OpenRequest, cache: AnyCache, *, is_kept: bool) -> None:
        """Makes room for the pages that a request's session takes in addition to those that `cache` has."""

        def num_missing(*, counts_uncharged: bool) -> int:
            return cache.num_missing(
                request.max_tokens, request.text, request.write_start,
                is_kept=is_kept, counts_uncharged=counts_uncharged,
            )  # fmt: skip

        session = self._sessions.get(request.session_id)
        num_pages, num_kept = num_missing(counts_uncharged=False), 0
        # What an idle session has does not count as its tenant's.
        num_more = num_pages + (cache.num_pages if session is not None and session.is_idle else 0)
        if self.guarantees and num_more > 0:
            held = self._held_pages()
            held[request.tenant] += num_more
            num_kept = self.guarantees.num_kept_from(request.tenant, held)
        self._make_room(
            num_pages, num_kept, keep=request.session_id,
            num_missing=lambda: num_missing(counts_uncharged=True), most_less=cache.num_common_pages,
        )  # fmt: skip

    def _make_room(
        self,
        num_pages: int,
        num_kept: int = 0,
        *,
        keep: bytes = b"",
        num_missing: Callable[[], int] | None = None,
        most_less: int = 0,
    ) -> None:
        """Makes room for `num_pages` more pages if `num_kept` stay available; does not evict the session `keep`.

        Args:
            num_missing: gives how many pages are missing if those count, too, that idle sessions hold in common. It
                looks a whole text up, so it is asked again only when what it said before may be available.
            most_less: how much less it may say after idle sessions have been evicted.
        """
        idle = [session for session in self if session.is_idle and session.request.session_id != keep]
        # A standby only saves time, and what else is idle may be a conversation.
        idle.sort(key=lambda session: session.state is not SessionState.STANDBY)
        num_idle = sum(session.num_pages for session in idle)
        num_available = self.pool.num_available + num_idle + self.pool.num_uncharged
        if num_pages + num_kept > num_available:
            # Evicting all idle sessions would not be enough.
            raise too_few_pages(num_pages, max(0, num_available - num_kept))
        least_missing = 0 if num_missing else num_pages
        for session in idle:
            if least_missing <= self.pool.num_available:
                num_more = num_missing() if num_missing else num_pages
                if num_more <= self.pool.num_available:
                    return
                least_missing = num_more - most_less
            self._free(session)
            self.num_evicted += 1

    def _touch(self, session: HopSession[AnyCache], now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.pop(session.request.session_id, None)
        self._sessions[session.request.session_id] = session

    def _free(self, session: HopSession[AnyCache]) -> None:
        session.apply(SessionEvent.FREED)
        del self._sessions[session.request.session_id]
        session.cache.clear()
        self.on_forget(session.request.session_id)
