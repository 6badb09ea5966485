"""Places on chains: a chain from the router, then a place for each session on each of its hops, or nothing at all."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from corolla.chassis.errors import HopLeaving, HopUnavailable, InvalidRequest, NoChain, OutOfPages
from corolla.client.chain.attempts import Attempts
from corolla.client.chain.identity import SessionIdentity
from corolla.client.chain.prefixes import TextDigests
from corolla.client.chain.recovery_plan import HopState
from corolla.client.chain.routes import Routes
from corolla.client.chain.streams import DataPlane
from corolla.planning.candidates import span_of
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from corolla.wire.tensors import MAX_PROMPT_BYTES, describe_prompts, to_payload

log = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 3
_RECONNECT_DELAY_S: Final = 0.2
_ALL_TOKENS: Final = 2**31
_AVOIDABLE: Final = (HopUnavailable, HopLeaving, OutOfPages)


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Sizes and times of steps, leases and recoveries.

    Attributes:
        max_recoveries: of one request; after them its failure is the caller's.
        recovery_patience_s: how long a recovery waits for a server that can replace a lost one.
        max_replayed_tokens: of all recoveries at a time, so that a server's death does not become a stampede.
        merges_replayed_steps: whether tokens that were processed one by one are replayed in chunks.
    """

    prefill_chunk_tokens: int
    prefill_chunk_tokens_beside_decode: int
    step_timeout_s: float
    lease_ms: int
    max_recoveries: int = 16
    recovery_patience_s: float = 30.0
    max_replayed_tokens: int = 8192
    merges_replayed_steps: bool = True


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a session needs of its hops.

    Attributes:
        max_tokens: pages for so many are reserved.
        lease_ms: how long the hops keep it without hearing of it; None is the configured lease.
        recorded: the chain of its last turn; those hops keep what they hold of it.
        record_id: the id under which the router knows the session, if it does.
        chain: just this one, without asking the router.
        blocks: of the planned chain only these.
        texts: of each session all tokens that it is going to hold, as far as they are known; hops may hold their
            beginnings already. The last token is left to be processed. None where the sessions are given other things.
        max_position: what hops hold beyond is not the session's text any more.
        prompts: trained embeddings for each session, `[blocks, P, H]` in the dtype of the weights; None without.
        keeps_outputs: whether hops keep what they send on, for the case that the next one is lost.
    """

    max_tokens: int
    transient: bool
    lease_ms: int | None = None
    recorded: common_pb2.Chain | None = None
    record_id: str = ""
    chain: common_pb2.Chain | None = None
    blocks: Span | None = None
    texts: Sequence[Sequence[int]] | None = None
    max_position: int | None = None
    prompts: Sequence[torch.Tensor] | None = None
    keeps_outputs: bool = True

    def resumes(self, hop: common_pb2.Hop) -> bool:
        """Whether the hop may hold something of the session that counts."""
        return self.recorded is not None and hop in self.recorded.hops


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places that were given.

    Attributes:
        max_step_tokens: that every hop takes in one step.
        opened: what each hop says of each session.
        num_cached_tokens: that every hop holds of every session, and can go on from.
    """

    chain: common_pb2.Chain
    max_step_tokens: int
    opened: Sequence[Sequence[pb.Opened]]
    num_cached_tokens: int

    def states(self, number: int) -> list[HopState]:
        """What each hop holds of one of the sessions."""
        return [
            HopState(answer.num_cached_tokens, answer.min_position, answer.kept_start, answer.kept_end)
            for answer in (on_hop[number] for on_hop in self.opened)
        ]


class NotOpened(Exception):
    """Some hops of a chain did not open; the others did."""

    def __init__(self, failures: Sequence[tuple[common_pb2.Hop, BaseException]]) -> None:
        super().__init__()
        self.failures = failures


class Reservations:
    """Opens sessions on the hops of chains."""

    def __init__(self, routes: Routes, plane: DataPlane, limits: ChainLimits) -> None:
        self._routes = routes
        self._plane = plane
        self._limits = limits

    async def reserve(self, identities: Sequence[SessionIdentity], options: OpenOptions) -> Reservation:
        """Opens sessions, all of them on one chain.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.
        One whose connection broke at once is asked a second time where there is no chain without it.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
            InvalidRequest: the prompts are too large for a hop.
        """
        attempts = Attempts()
        clock = asyncio.get_running_loop().time
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            chain = options.chain or await self._choose(len(identities), options, attempts)
            if attempts.is_second(chain):
                await self._reconnect(identities, options, chain)
            asked_s = clock()
            try:
                return await self.open(identities, options, chain)
            except NotOpened as refused:
                failures = refused.failures
            self._undo(identities, options, chain)
            attempts.note(failures, clock() - asked_s)
            for hop, failure in failures:
                self._routes.refused(hop.server_id, failure)
            hard = [failure for _, failure in failures if not isinstance(failure, _AVOIDABLE)]
            if hard or attempt == _MAX_ATTEMPTS or options.chain is not None:
                raise (hard or [failure for _, failure in failures])[0]
            last_failure = failures[0][1]
            log.warning(
                "chain not opened; trying another", extra={"reason": getattr(last_failure, "reason", "INTERNAL")}
            )
        raise NoChain("no chain could be opened")

    async def open(
        self, identities: Sequence[SessionIdentity], options: OpenOptions, chain: common_pb2.Chain
    ) -> Reservation:
        """Opens sessions on just this chain.

        Raises:
            NotOpened: what did open stays so, and is the caller's to give back.
        """
        last = len(chain.hops) - 1
        # What trained prompts make of a text is no other session's.
        texts = None if options.prompts is not None or options.texts is None else list(map(TextDigests, options.texts))
        try:
            answers = await asyncio.gather(
                *(
                    self._open_on(hop, identities, options, texts, keep_outputs=options.keeps_outputs and number < last)
                    for number, hop in enumerate(chain.hops)
                )
            )
        except asyncio.CancelledError:
            self._undo(identities, options, chain)
            raise
        failures = [
            (hop, answer)
            for hop, on_hop in zip(chain.hops, answers, strict=True)
            for answer in on_hop
            if isinstance(answer, BaseException)
        ]
        if failures:
            raise NotOpened(failures)
        given = [[answer for answer in on_hop if not isinstance(answer, BaseException)] for on_hop in answers]
        return Reservation(
            chain,
            max_step_tokens=min(max_tokens for on_hop in given for _, max_tokens in on_hop),
            opened=[[opened for opened, _ in on_hop] for on_hop in given],
            num_cached_tokens=_common_position(
                [opened for on_hop in given for opened, _ in on_hop], options.max_position
            ),
        )

    def give_back(self, identities: Sequence[SessionIdentity], hops: Sequence[common_pb2.Hop]) -> None:
        """Frees sessions on some hops. What a hop holds of a later epoch, it keeps."""
        for hop in hops:
            for identity in identities:
                self._plane.tell(hop.address, pb.Close(session_id=identity.session_id, epoch=identity.epoch))

    async def _choose(self, num_sessions: int, options: OpenOptions, attempts: Attempts) -> common_pb2.Chain:
        """Where hops of the last turn are gone, those that remain keep what they hold."""
        num_tokens = options.max_tokens * num_sessions
        if options.recorded is not None:
            kept = await self._routes.kept(options.recorded, attempts.too_full | attempts.failed, num_tokens=num_tokens)
            if kept is not None:
                return kept
        return await self._routes.plan(
            num_tokens=num_tokens,
            record_id=options.record_id,
            blocks=options.blocks,
            too_full=attempts.too_full,
            failed=attempts.failed,
        )

    async def _open_on(
        self,
        hop: common_pb2.Hop,
        identities: Sequence[SessionIdentity],
        options: OpenOptions,
        texts: Sequence[TextDigests] | None,
        *,
        keep_outputs: bool,
    ) -> list[tuple[pb.Opened, int] | BaseException]:
        # Prompts may be large: only one session's wait to be written.
        turn = contextlib.nullcontext() if options.prompts is None else asyncio.Lock()

        async def open_one(number: int) -> tuple[pb.Opened, int]:
            async with turn:
                welcome = await self._plane.connect(hop.address)
                if not span_of(welcome.span).covers(span_of(hop.span)):
                    raise HopUnavailable("another server has a hop's address, with other blocks", hop.address)
                request = self._frame(identities[number], options, hop)
                request.keep_outputs = keep_outputs
                if texts is not None and welcome.page_tokens:
                    request.text.CopyFrom(texts[number].of(welcome.page_tokens))
                return await self._plane.open(hop.address, request, _describe_prompts(request, number, options))

        return await asyncio.gather(*map(open_one, range(len(identities))), return_exceptions=True)

    def _frame(self, identity: SessionIdentity, options: OpenOptions, hop: common_pb2.Hop) -> pb.Open:
        return pb.Open(
            session_id=identity.session_id,
            epoch=identity.epoch,
            tenant=identity.tenant,
            resume=options.resumes(hop),
            max_tokens=options.max_tokens,
            blocks=hop.span,
            lease_ms=options.lease_ms or self._limits.lease_ms,
            transient=options.transient,
        )

    async def _reconnect(
        self, identities: Sequence[SessionIdentity], options: OpenOptions, chain: common_pb2.Chain
    ) -> None:
        """An open may have come through whose answer did not: it is taken back on the new connection."""
        await asyncio.sleep(_RECONNECT_DELAY_S)
        await asyncio.gather(*(self._plane.connect(hop.address) for hop in chain.hops), return_exceptions=True)
        self._undo(identities, options, chain)

    def _undo(self, identities: Sequence[SessionIdentity], options: OpenOptions, chain: common_pb2.Chain) -> None:
        """What an open that failed in part has taken is given back; what hops held before, they keep."""
        for hop in chain.hops:
            for identity in identities:
                session_id, epoch = identity.session_id, identity.epoch
                keep = pb.Truncate(session_id=session_id, epoch=epoch, position=_ALL_TOKENS, idle=True)
                drop = pb.Close(session_id=session_id, epoch=epoch)
                self._plane.tell(hop.address, keep if options.resumes(hop) else drop)


def _describe_prompts(request: pb.Open, number: int, options: OpenOptions) -> Buffer:
    """The payload for just the blocks of an open, which is told what it will be."""
    if options.prompts is None:
        return b""
    first = options.blocks.start if options.blocks is not None else 0
    part = options.prompts[number][request.blocks.start - first : request.blocks.end - first]
    if part.nbytes > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            "block_prompts",
            f"those of blocks {request.blocks.start}:{request.blocks.end} take {part.nbytes >> 20} MiB; a hop takes at "
            f"most {MAX_PROMPT_BYTES >> 20} MiB",
        )
    request.block_prompts.CopyFrom(describe_prompts(part))
    return to_payload(part)


def _common_position(answers: Sequence[pb.Opened], max_position: int | None) -> int:
    """The highest position that all hops can go on from: 0, where a sliding window has moved beyond the others' end."""
    position = min(answer.num_cached_tokens for answer in answers)
    if max_position is not None:
        position = min(position, max_position)
    return position if position >= max(answer.min_position for answer in answers) else 0
