"""Places on chains: a chain from the router, then a place for each session on each of its hops, or nothing at all."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from corolla.chassis.errors import (
    HopUnavailable,
    InvalidRequest,
    ModelNotFound,
    NoChain,
    OutOfPages,
    RouterUnavailable,
    StoreUnavailable,
)
from corolla.client.chain.control import ControlPlane
from corolla.client.chain.placement import PlacementWatch
from corolla.client.chain.prefixes import page_hashes
from corolla.client.chain.session import SessionIdentity
from corolla.client.chain.streams import DataPlane
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer
from corolla.wire.span import Span
from corolla.wire.tensors import MAX_PROMPT_BYTES, tensor_type, to_payload

log = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 3
_QUARANTINE_S: Final = 5.0
_ALL_TOKENS: Final = 2**31


@dataclass(frozen=True, slots=True)
class ChainLimits:
    """Sizes and times of steps and leases."""

    prefill_chunk_tokens: int
    step_timeout_s: float
    lease_ms: int


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

    def resumes(self, hop: common_pb2.Hop) -> bool:
        """Whether the hop may hold something of the session that counts."""
        return self.recorded is not None and hop in self.recorded.hops


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places that were given.

    Attributes:
        num_cached_tokens: that every hop holds of every session, and can go on from.
        max_step_tokens: that every hop takes in one step.
    """

    chain: common_pb2.Chain
    num_cached_tokens: int
    max_step_tokens: int


class Reservations:
    """Plans chains and opens sessions on their hops; remembers for a while which hops could not be reached."""

    def __init__(
        self,
        control: ControlPlane,
        placement: PlacementWatch,
        plane: DataPlane,
        fingerprint: str,
        num_blocks: int,
        limits: ChainLimits,
    ) -> None:
        self._control = control
        self._placement = placement
        self._plane = plane
        self._fingerprint = fingerprint
        self._num_blocks = num_blocks
        self._limits = limits
        self._quarantine: dict[str, float] = {}

    async def reserve(self, identities: Sequence[SessionIdentity], options: OpenOptions) -> Reservation:
        """Opens sessions, all of them on one chain.

        A hop that cannot be reached is left out for a while and another chain is tried; so is one without free pages.

        Raises:
            NoChain, OutOfPages, HopUnavailable: nothing stays allocated.
            InvalidRequest: the prompts are too large for a hop.
        """
        too_full: set[str] = set()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            chain = options.chain or await self._plan(len(identities), options, frozenset(too_full))
            opened, failures = await self._open(identities, options, chain)
            if not failures:
                return Reservation(
                    chain,
                    num_cached_tokens=_common_position([answer for answer, _ in opened], options.max_position),
                    max_step_tokens=min(max_tokens for _, max_tokens in opened),
                )
            self._undo(identities, options, chain)
            for hop, failure in failures:
                if isinstance(failure, HopUnavailable):
                    self._quarantine[hop.server_id] = asyncio.get_running_loop().time() + _QUARANTINE_S
                elif isinstance(failure, OutOfPages):
                    too_full.add(hop.server_id)
            hard = [failure for _, failure in failures if not isinstance(failure, HopUnavailable | OutOfPages)]
            if hard or attempt == _MAX_ATTEMPTS or options.chain is not None:
                raise (hard or [failure for _, failure in failures])[0]
            last_failure = failures[0][1]
            log.warning(
                "chain not opened; trying another", extra={"reason": getattr(last_failure, "reason", "INTERNAL")}
            )
        raise NoChain("no chain could be opened")

    async def _open(
        self, identities: Sequence[SessionIdentity], options: OpenOptions, chain: common_pb2.Chain
    ) -> tuple[list[tuple[pb.Opened, int]], list[tuple[common_pb2.Hop, BaseException]]]:
        try:
            answers = await asyncio.gather(*(self._open_on(hop, identities, options) for hop in chain.hops))
        except asyncio.CancelledError:
            self._undo(identities, options, chain)
            raise
        places = [(hop, answer) for hop, on_hop in zip(chain.hops, answers, strict=True) for answer in on_hop]
        failures = [(hop, answer) for hop, answer in places if isinstance(answer, BaseException)]
        return [answer for _, answer in places if not isinstance(answer, BaseException)], failures

    async def _open_on(
        self, hop: common_pb2.Hop, identities: Sequence[SessionIdentity], options: OpenOptions
    ) -> list[tuple[pb.Opened, int] | BaseException]:
        # Prompts may be large: only one session's wait to be written.
        turn = contextlib.nullcontext() if options.prompts is None else asyncio.Lock()

        async def open_one(number: int) -> tuple[pb.Opened, int]:
            async with turn:
                request = self._frame(identities[number], options, hop)
                if options.texts is not None and options.prompts is None:
                    await self._describe_text(request, hop, options.texts[number])
                return await self._plane.open(hop.address, request, _describe_prompts(request, number, options))

        return await asyncio.gather(*map(open_one, range(len(identities))), return_exceptions=True)

    async def _plan(self, num_sessions: int, options: OpenOptions, too_full: frozenset[str]) -> common_pb2.Chain:
        now_s = asyncio.get_running_loop().time()
        self._quarantine = {server: until for server, until in self._quarantine.items() if until > now_s}
        excluded = too_full | frozenset(self._quarantine)
        plan = partial(
            self._control.plan_chain,
            fingerprint=self._fingerprint,
            session_id=options.record_id,
            excluded=excluded,
        )
        try:
            try:
                planned = await plan(num_tokens=options.max_tokens * num_sessions)
            except OutOfPages:
                # What the router knows of pages is as old as the last heartbeat; the hops have the last word.
                planned = await plan(num_tokens=0)
        except (RouterUnavailable, StoreUnavailable):
            chain = self._placement.cheapest_chain
            if chain is None or chain.fingerprint != self._fingerprint:
                raise
            if any(hop.server_id in excluded for hop in chain.hops):
                raise
            return _cut(chain, options.blocks)
        except ModelNotFound:
            # We do have the model; only its blocks have no server, and never had one.
            listed = f"0:{self._num_blocks}"
            raise NoChain(f"no server holds blocks {listed}", metadata={"uncovered_blocks": listed}) from None
        except NoChain:
            # Leaving servers out may have made the gap; then what is wrong with them is the better answer.
            if too_full:
                raise OutOfPages("block servers have too few free KV pages for this request") from None
            raise
        return _cut(planned.chain, options.blocks)

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

    async def _describe_text(self, request: pb.Open, hop: common_pb2.Hop, token_ids: Sequence[int]) -> None:
        page_tokens = (await self._plane.connect(hop.address)).page_tokens
        if page_tokens:
            request.text.num_tokens = len(token_ids)
            request.text.page_hashes = page_hashes(token_ids, page_tokens)

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
    request.block_prompts.CopyFrom(
        pb.BlockPrompts(num_tokens=part.shape[1], dtype=tensor_type(part.dtype), hidden_size=part.shape[2])
    )
    return to_payload(part)


def _common_position(answers: Sequence[pb.Opened], max_position: int | None) -> int:
    """The highest position that all hops can go on from: 0, where a sliding window has moved beyond the others' end."""
    position = min(answer.num_cached_tokens for answer in answers)
    if max_position is not None:
        position = min(position, max_position)
    return position if position >= max(answer.min_position for answer in answers) else 0


def _cut(chain: common_pb2.Chain, blocks: Span | None) -> common_pb2.Chain:
    """The part of a chain that covers just `blocks`."""
    if blocks is None:
        return chain
    return common_pb2.Chain(hops=_hops_within(chain, blocks), fingerprint=chain.fingerprint)


def _hops_within(chain: common_pb2.Chain, blocks: Span) -> Iterator[common_pb2.Hop]:
    for hop in chain.hops:
        start, end = max(hop.span.start, blocks.start), min(hop.span.end, blocks.end)
        if start < end:
            part = common_pb2.Hop()
            part.CopyFrom(hop)
            part.span.start, part.span.end = start, end
            yield part
