"""The sessions that this hop holds: epochs, owners, leases and reserved pages. Pure: time is passed in."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic

from corolla.block_server.held import AnyCache, HopSession, OpenRequest
from corolla.block_server.kv.pages import PagePool, too_few_pages
from corolla.block_server.kv.prefixes import salt_of
from corolla.block_server.prompts import BlockPrompts
from corolla.chassis.errors import HopLeaving, HopSessionLost, OutOfPages, PositionGap, StaleEpoch
from corolla.wire.span import Span


class SessionTable(Generic[AnyCache]):
    """All sessions of the hop.

    Invariant: the pages that sessions were promised and the pool's available ones add up to the pool.

    Args:
        max_prompt_bytes: of the trained prompts of all sessions together.

    Attributes:
        on_forget: is told of each session whose tokens are all forgotten, so that nothing of them stays elsewhere.
        is_draining: no session comes any more; those that are held may be reopened until they leave.
    """

    def __init__(self, pool: PagePool, new_cache: Callable[[], AnyCache], *, max_prompt_bytes: int = 0) -> None:
        self.pool = pool
        self.on_forget: Callable[[bytes], None] = lambda session_id: None
        self._new_cache = new_cache
        self._max_prompt_bytes = max_prompt_bytes
        # Least recently used first.
        self._sessions: dict[bytes, HopSession[AnyCache]] = {}
        self.num_evicted = 0
        self.is_draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[HopSession[AnyCache]]:
        return iter(self._sessions.values())

    @property
    def num_available_pages(self) -> int:
        """Pages that a new session could have: what the pool has, and those of idle sessions."""
        return self.pool.num_available + sum(held.num_pages for held in self if held.is_idle)

    @property
    def max_session_tokens(self) -> int:
        """Tokens of the longest session that could be opened now."""
        return self._new_cache().longest(self.num_available_pages)

    def tenant_of(self, session_id: bytes) -> str:
        """Whose the session is; empty where it is not held."""
        held = self._sessions.get(session_id)
        return "" if held is None else held.request.tenant

    def num_pages_in_use(self, session_id: bytes) -> int:
        """Pages of a session that only its own end, or another open of it, makes available."""
        held = self._sessions.get(session_id)
        return 0 if held is None or held.is_idle else held.num_pages

    def check_room(self, request: OpenRequest, max_released_pages: int) -> None:
        """Says early what `open` could only confirm. It may be asked while steps are computed.

        Steps give back none of what their sessions were promised, and idle sessions have no steps; so a new or an idle
        session will find at most the pages that are available now, and those that are released before its turn.

        Args:
            request: as for `open`.
            max_released_pages: that the changes before its turn may give back.

        Raises:
            OutOfPages: the worst case will not fit.
        """
        held = self._sessions.get(request.session_id)
        if held is not None and not held.is_idle:
            return
        num_pages = self._new_cache().worst_case(request.max_tokens)
        num_available = self.num_available_pages + max_released_pages
        if num_pages > num_available:
            raise too_few_pages(num_pages, num_available)

    def get(self, session_id: bytes) -> HopSession[AnyCache] | None:
        return self._sessions.get(session_id)

    def open(self, request: OpenRequest, now_s: float) -> HopSession[AnyCache]:
        """Opens a session, or reopens it with a higher epoch.

        Raises:
            HopLeaving: this server drains.
            StaleEpoch: it was opened with a higher epoch before, or with this one and not taken back.
            HopSessionLost: it belongs to another tenant.
            OutOfPages: the worst case does not fit, or its prompts; a session that was there before stays as it was.
        """
        held = self._sessions.get(request.session_id)
        if (held is None and self.is_draining) or (held is not None and held.is_leaving):
            raise HopLeaving("a block server takes no new sessions")
        if held is not None:
            if held.request.tenant != request.tenant:
                raise HopSessionLost("the session is not held here")
            if held.request.epoch >= request.epoch and not held.makes_way_for(request):
                raise StaleEpoch("the session was opened with this epoch or a later one")
        if request.prompts is not None:
            self._check_prompts(request.prompts, except_of=request.session_id)
        cache = self._new_cache() if held is None else held.cache
        self._make_room(cache.worst_case(request.max_tokens) - cache.num_pages, keep=request.session_id)
        if held is None:
            held = HopSession(request, cache, 0.0)
            self._sessions[request.session_id] = held
        elif not request.resume or held.is_arriving or not held.request.agrees_with(request):
            cache.clear()
            self.on_forget(request.session_id)
        elif cache.num_tokens > request.max_tokens:
            cache.truncate(cache.nearest_position(request.max_tokens))
        cache.open(request.max_tokens, request.text)
        held.request = request if request.prompts is None else replace(request, prompts=request.prompts.copy())
        held.is_idle = held.is_copy = held.is_forsaken = False
        held.transfer_id = b""
        self._touch(held, now_s)
        return held

    def receive(self, request: OpenRequest, transfer_id: bytes, now_s: float) -> HopSession[AnyCache]:
        """Makes room for a session that another server hands over, or goes on with it after a broken stream.

        Args:
            transfer_id: of the handover, random; only who knows it can send the rest.

        Raises:
            HopLeaving: this server drains, too.
            StaleEpoch: its client opened it here meanwhile, or knows of a later epoch; or other blocks of it are here.
            HopSessionLost: it belongs to another tenant.
            OutOfPages: the worst case does not fit, or its prompts.
        """
        if self.is_draining:
            raise HopLeaving("a block server takes no new sessions")
        held = self._sessions.get(request.session_id)
        if held is not None and held.request.tenant == request.tenant:
            if held.request.epoch == request.epoch and held.request.blocks != request.blocks:
                raise StaleEpoch("this server has other blocks of the session")
            if held.is_copy:
                if held.request.epoch > request.epoch:
                    raise StaleEpoch("the session was handed over with a later epoch")
                if held.transfer_id == transfer_id and held.request.epoch == request.epoch:
                    self._touch(held, now_s)
                    return held
                self._free(held)
        held = self.open(request, now_s)
        held.transfer_id = transfer_id
        held.is_copy = True
        return held

    def arriving(self, session_id: bytes, epoch: int, transfer_id: bytes, now_s: float) -> HopSession[AnyCache]:
        """The session that is being handed over. Raises HopSessionLost where this handover fills none."""
        held = self._sessions.get(session_id)
        if held is None or not transfer_id or (held.request.epoch, held.transfer_id) != (epoch, transfer_id):
            raise HopSessionLost("no such session is being handed over")
        # Its place in the order of use stays: this is asked in the compute thread, and others may be looking.
        held.touched_s = now_s
        return held

    def arrived(self, held: HopSession[AnyCache], *, is_idle: bool) -> None:
        """All of it is here. An idle one keeps no more pages than it needs, and gives way to others."""
        held.transfer_id = b""
        held.is_idle = is_idle
        if is_idle:
            held.cache.reserve(held.cache.num_tokens)

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
    ) -> HopSession[AnyCache]:
        """The session of a step, checked. `forked`, if given, becomes its cache. What computes looks at earlier tokens.

        Raises:
            HopLeaving, HopSessionLost, StaleEpoch, PositionGap, OutOfPages: the step must not be computed.

        An epoch ends with its turn: a step that was forwarded by another hop may come after the client's own word that
        the turn is over, and must not wake the session.
        """
        held = self._sessions.get(session_id)
        if held is None or held.request.client_id != client_id or held.request.blocks != blocks:
            raise HopSessionLost("the session is not held here")
        if held.is_leaving:
            raise HopLeaving("the session is handed over to another block server")
        if held.is_forsaken and held.request.epoch == epoch:
            raise HopSessionLost("the stream on which the session was opened has ended")
        if held.request.epoch != epoch or held.is_idle or held.is_arriving:
            raise StaleEpoch("the session was opened with another epoch, or its turn is over")
        cache = held.cache if forked is None else forked
        if position > cache.num_tokens:
            raise PositionGap("the hop holds fewer tokens than the step assumes", cache.num_tokens)
        if computes and not cache.can_continue_from(position):
            raise PositionGap(
                "the hop has given back tokens that this step would see", cache.nearest_position(position)
            )
        if self.pool.pages_for(position + num_tokens) > self.pool.pages_for(held.cache.num_reserved_tokens):
            raise OutOfPages("the step goes beyond the pages reserved for its session")
        if forked is not None:
            forked.truncate(position)
            held.cache.adopt(forked)
        self._touch(held, now_s)
        return held

    def fork(self, source_id: bytes, session_id: bytes, client_id: bytes, blocks: Span) -> AnyCache:
        """What a session of the same client holds, for another of its sessions.

        Raises:
            HopSessionLost: it is not held here, is another client's, uses other blocks, or only one of the two has
                trained prompts.
        """
        held, taker = self._sessions.get(source_id), self._sessions.get(session_id)
        if held is None or held.request.client_id != client_id or held.request.blocks != blocks:
            raise HopSessionLost("the session to fork from is not held here")
        if taker is not None and not held.request.agrees_with(taker.request):
            raise HopSessionLost("a session with trained prompts and one without do not share tokens")
        return held.cache.fork()

    def truncate(self, session_id: bytes, epoch: int, position: int, *, idle: bool) -> None:
        """Forgets tokens and gives back pages; an idle session may be evicted. A stale request changes nothing."""
        # A turn may end in a later epoch than that in which it was opened here: in the midst of a recovery.
        held = self._sessions.get(session_id)
        if held is None or held.request.epoch > epoch:
            return
        if position < held.cache.num_tokens:
            held.cache.truncate(held.cache.nearest_position(position))
        held.cache.reserve(held.cache.num_tokens)
        held.is_idle = idle

    def describe(self, session_id: bytes, epoch: int, hashes: Sequence[bytes]) -> None:
        """Says what the session's first pages hold. A stale word counts nothing, nor one of other than text."""
        held = self._sessions.get(session_id)
        if held is not None and held.request.epoch == epoch and held.request.prompts is None:
            held.cache.describe(salt_of(held.request.tenant, held.request.blocks), hashes)

    def close(self, session_id: bytes, epoch: int) -> None:
        """Frees the session, unless it was reopened since."""
        held = self._sessions.get(session_id)
        if held is not None and held.request.epoch <= epoch:
            self._free(held)

    def forsake(self, client_id: bytes, stream: int | None = None) -> int:
        """The client's streams ended, or just this: frees the sessions that live only with it, and returns how many.

        The others stay for whoever opens them next, with the pages of their tokens, and make room where there is none:
        the client has gone on without this hop, or is gone itself. Which of them nobody will come back for, only the
        router knows.
        """
        gone = [held for held in self if held.request.client_id == client_id and stream in (None, held.request.stream)]
        for held in gone:
            if held.request.transient:
                self._free(held)
            else:
                held.is_idle = held.is_forsaken = True
                if not held.is_arriving:
                    held.cache.reserve(held.cache.num_tokens)
        return sum(1 for held in gone if held.request.transient)

    def expire(self, now_s: float) -> int:
        """Frees the sessions whose lease ran out. Returns how many."""
        gone = [held for held in self if held.lease_deadline_s < now_s]
        for held in gone:
            self._free(held)
        return len(gone)

    def _check_prompts(self, prompts: BlockPrompts, *, except_of: bytes) -> None:
        others = (each.request for each in self if each.request.session_id != except_of)
        if prompts.nbytes + sum(each.prompts.nbytes for each in others if each.prompts) > self._max_prompt_bytes:
            raise OutOfPages("the trained prompts of all sessions do not fit into the memory for them")

    def _make_room(self, num_pages: int, keep: bytes) -> None:
        idle = [held for held in self if held.is_idle and held.request.session_id != keep]
        if num_pages > self.pool.num_available + sum(held.num_pages for held in idle):
            self.pool.promise(num_pages)  # says what is missing; evicting would not have helped
        for held in idle:
            if num_pages <= self.pool.num_available:
                return
            self._free(held)
            self.num_evicted += 1

    def _touch(self, held: HopSession[AnyCache], now_s: float) -> None:
        held.touched_s = now_s
        self._sessions[held.request.session_id] = self._sessions.pop(held.request.session_id)

    def _free(self, held: HopSession[AnyCache]) -> None:
        del self._sessions[held.request.session_id]
        held.cache.clear()
        self.on_forget(held.request.session_id)
