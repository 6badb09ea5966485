"""Hands one session over: what it holds is copied while it goes on; only for the last part it has to wait."""

import asyncio
import secrets
import zlib
from dataclasses import dataclass

from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import ID_BYTES
from corolla.block_server.handover.link import HandoverLink
from corolla.block_server.handover.plan import Progress
from corolla.block_server.held import HopSession, OpenRequest
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.kv.transfer import TokenCopy, read_tokens, token_bytes
from corolla.block_server.sessions import SessionTable
from corolla.chassis.errors import ChecksumMismatch, HopSessionLost, HopUnavailable, PositionGap
from corolla.chassis.status import from_reason
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.span import Span
from corolla.wire.tensors import describe_prompts, to_payload

PART_BYTES = 1 << 20
_REPEATABLE = frozenset({PositionGap.reason, ChecksumMismatch.reason})


@dataclass(frozen=True, slots=True)
class _Part:
    frame: pb.HandoverTokens
    copy: TokenCopy


class HandoverSender:
    """Copies sessions of this server to others, part by part, with one part of a session under way at a time.

    Args:
        span: of this server.
        max_part_tokens: that a receiver takes at once.
    """

    def __init__(
        self, span: Span, sessions: SessionTable[SessionCache], engine: Engine, *, max_part_tokens: int
    ) -> None:
        self._span = span
        self._sessions = sessions
        self._engine = engine
        self._max_part_tokens = max_part_tokens
        # Of each session whose handover broke off the receiver that may go on with it, and the handover's id.
        self._begun: dict[bytes, tuple[str, bytes]] = {}

    async def send(self, held: HopSession[SessionCache], link: HandoverLink) -> int:
        """Hands a session over. Afterwards it takes no steps here; after a failure it does as before.

        Returns:
            Bytes of keys and values that were sent.

        Raises:
            HopUnavailable: the link broke; what arrived counts when the same is tried again.
            HopSessionLost: the session ended, or was opened again, meanwhile.
            CorollaError: why the receiver refused. It holds nothing of it then.
        """
        request = held.request
        address, transfer_id = self._begun.pop(request.session_id, ("", b""))
        if address != link.address:
            transfer_id = secrets.token_bytes(ID_BYTES)
        progress = Progress()
        is_taken = False
        try:
            offer, prompts = _offer(request, transfer_id)
            self._note(await link.ask(offer, prompts), progress)
            is_taken = True
            num_bytes = await self._send(held, request, transfer_id, progress, link)
            self._check(held, request)
            return num_bytes
        except BaseException as failure:
            if isinstance(failure, HopUnavailable):
                self._begun[request.session_id] = (link.address, transfer_id)
            elif is_taken:
                # Whoever refused the offer may have the session from elsewhere, and keeps that.
                link.tell(pb.Close(session_id=request.session_id, epoch=request.epoch))
            if held.request is request:
                held.is_leaving = False
            raise

    async def _send(
        self,
        held: HopSession[SessionCache],
        request: OpenRequest,
        transfer_id: bytes,
        progress: Progress,
        link: HandoverLink,
    ) -> int:
        num_bytes = 0
        while True:
            part = await self._engine.copies.make(lambda: self._read(held, request, progress))
            part.frame.transfer_id = transfer_id
            answer = await link.ask(part.frame, part.copy.payload)
            self._note(answer, progress)
            if not answer.reason:
                num_bytes += len(part.copy.payload)
                if part.frame.is_last:
                    return num_bytes
            await asyncio.sleep(0)

    def _note(self, answer: pb.HandoverAnswer, progress: Progress) -> None:
        if answer.reason and answer.reason not in _REPEATABLE:
            raise from_reason(answer.reason, answer.message)
        if not progress.answered(answer.num_tokens, taken=not answer.reason):
            raise HopUnavailable("a handover does not get on")

    def _check(self, held: HopSession[SessionCache], request: OpenRequest) -> None:
        if self._sessions.get(request.session_id) is not held or held.request is not request:
            raise HopSessionLost("the session ended, or goes on in another epoch")

    def _read(self, held: HopSession[SessionCache], request: OpenRequest, progress: Progress) -> _Part:
        """In the compute thread: the next part; with the last one the session stands still."""
        self._check(held, request)
        cache, blocks = held.cache, request.blocks
        layers = self._span.indices(blocks)
        max_tokens = max(1, min(self._max_part_tokens, PART_BYTES // token_bytes(cache.store, layers)))
        start, num_tokens, is_last = progress.next_part(cache.num_tokens, cache.num_unchanged_tokens, max_tokens)
        copy = read_tokens(cache, layers, start, num_tokens)
        cache.num_unchanged_tokens = copy.end
        if is_last:
            held.is_leaving = True
        frame = pb.HandoverTokens(
            session_id=request.session_id, epoch=request.epoch, position=start, num_tokens=num_tokens,
            first_tokens=copy.first_tokens, checksum=zlib.crc32(copy.payload), is_last=is_last, is_idle=held.is_idle,
        )  # fmt: skip
        return _Part(frame, copy)


def _offer(request: OpenRequest, transfer_id: bytes) -> tuple[pb.Handover, memoryview | bytes]:
    offer = pb.Handover(
        session_id=request.session_id, epoch=request.epoch, tenant=request.tenant, client_id=request.client_id,
        max_tokens=request.max_tokens, blocks=common_pb2.BlockSpan(start=request.blocks.start, end=request.blocks.end),
        lease_ms=round(request.lease_s * 1000), transient=request.transient, keep_outputs=request.keep_outputs,
        transfer_id=transfer_id,
    )  # fmt: skip
    if request.prompts is None:
        return offer, b""
    values = request.prompts.values
    offer.block_prompts.CopyFrom(describe_prompts(values))
    return offer, to_payload(values)
