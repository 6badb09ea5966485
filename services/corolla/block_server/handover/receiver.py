"""Takes sessions from other block servers, to hand over or to stand by: reserves pages, checks and writes each part."""

import asyncio
import logging
import zlib
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from corolla.block_server.engine import Engine
from corolla.block_server.hop_session import HopSession, OpenRequest, SessionState
from corolla.block_server.metrics import BlockServerMetrics
from corolla.block_server.peers import Peer
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import KVStore, SessionCache
from corolla.cache.transfer import (
    CheckedCopy,
    TokenCopy,
    check_tokens,
    forget_unsent,
    note_unsent,
    without_last_layer,
    write_tokens,
)
from corolla.chassis.errors import (
    ChecksumMismatch,
    CorollaError,
    HopSessionLost,
    InternalError,
    MalformedMessage,
    PositionGap,
    QueueFull,
)
from corolla.chassis.handlers import call_path
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer
from corolla.wire.span import Span

log = logging.getLogger(__name__)

_MAX_WAITING_BYTES: Final = 1 << 30
_LEAST_PART_BYTES: Final = 4 << 20
"""A waiting part counts as so many bytes at least."""
_MAX_CHECKED_PARTS: Final = 4
"""At most so many parts take memory of the device, in addition to pages."""


@dataclass(eq=False, repr=False)
class HandoverReceiver:
    """Reserves pages for sessions that other servers offer, and writes their parts.

    Args:
        max_part_tokens: the most tokens that one part may have.
    """

    span: Span
    sessions: SessionTable[SessionCache]
    engine: Engine
    metrics: BlockServerMetrics
    tasks: TaskGroup
    _: KW_ONLY
    max_part_tokens: int
    _num_waiting_bytes: int = field(init=False, default=0)
    _room: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_MAX_CHECKED_PARTS))
    _standby_room: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(_MAX_CHECKED_PARTS))

    def on_offer(self, request: OpenRequest, transfer_id: bytes, peer: Peer) -> None:
        """Reserves pages for an offered session, or refuses it. Must be called between iterations."""
        answer = pb.HandoverAnswer(session_id=request.session_id, epoch=request.epoch, transfer_id=transfer_id)
        try:
            answer.num_tokens = self.sessions.receive(request, transfer_id, self.engine.clock()).cache.num_tokens
        except CorollaError as error:
            answer.reason, answer.message = error.reason, error.message
        peer.send(answer)

    def on_part(self, control: pb.HandoverTokens, payload: Buffer, peer: Peer) -> None:
        """Starts to write a part of a session that was offered before."""
        if self._num_waiting_bytes >= _MAX_WAITING_BYTES:
            if not self._is_standby(control):
                raise MalformedMessage("handover", "must send the next part only after earlier ones were written")
            peer.send(answer_to(control, QueueFull("a block server stands by for too many sessions")))
            return
        self._num_waiting_bytes += max(len(payload), _LEAST_PART_BYTES)
        self.tasks.start(self._receive(control, payload, peer), "part of a handover")

    async def _receive(self, control: pb.HandoverTokens, payload: Buffer, peer: Peer) -> None:
        answer = answer_to(control)
        is_standby = self._is_standby(control)
        try:
            async with self._standby_room if is_standby else self._room:
                store, layers = self._check(control)
                checked = await asyncio.to_thread(_checked, store, layers, control, payload)
                # Steps wait for this only.
                answer.num_tokens = await self.engine.copy(lambda: self._write(control, checked))
            (self.metrics.standbys.bytes if is_standby else self.metrics.handover_bytes).labels("in").inc(len(payload))
        except CorollaError as error:
            answer.reason, answer.message = error.reason, error.message
            session = self.sessions.get(control.session_id)
            if isinstance(error, PositionGap):
                answer.num_tokens = error.held
            elif session is not None and session.is_filled_by(control.epoch, control.transfer_id):
                answer.num_tokens = session.cache.num_tokens
        except Exception as failure:
            # The sender waits for an answer in any case.
            log.error("could not write a part of a handover", extra={"where": call_path(failure)})
            answer.reason, answer.message = InternalError.reason, "the part cannot be written"
        finally:
            self._num_waiting_bytes -= max(len(payload), _LEAST_PART_BYTES)
        peer.send(answer)

    def _check(self, control: pb.HandoverTokens) -> tuple[KVStore, range]:
        """Checks that a part may come for its session. Returns where its layers are stored."""
        session = self._arriving(control)
        store = session.cache.store
        layers = store.layers_of(self.span, session.request.blocks)
        # The sender may have the layer of the multi-token prediction block, too, whether or not this server has it.
        has_one_for_each = len(control.first_tokens) in (len(layers), len(layers) + 1)
        if not has_one_for_each or control.num_tokens > self.max_part_tokens:
            raise MalformedMessage(
                "handover", "must have a first token for each block, and no more tokens than one part takes"
            )
        if control.position + control.num_tokens > session.request.max_tokens:
            raise MalformedMessage("handover", "must not have more tokens than the session was offered with")
        if control.is_last and session.state is SessionState.STANDBY:
            raise MalformedMessage("is_last", "must be in a part of a session that was offered")
        return store, layers

    def _is_standby(self, control: pb.HandoverTokens) -> bool:
        session = self.sessions.get(control.session_id)
        return session is not None and session.state is SessionState.STANDBY

    def _write(self, control: pb.HandoverTokens, checked: CheckedCopy) -> int:
        """Writes a part, in the compute thread. Returns how many tokens the session then holds."""
        # The session may have been offered anew since the part was checked.
        store, layers = self._check(control)
        if checked.layers not in (layers, store.held_layers(layers)):
            raise HopSessionLost("the session was offered for other blocks")
        session = self._arriving(control)
        cache, copy = session.cache, checked.copy
        if not cache.can_take(copy.position):
            held = min(copy.position, cache.num_tokens)
            raise PositionGap("the part does not follow what is held", held if cache.can_take(held) else 0)
        if session.state is SessionState.STANDBY:
            self.sessions.grow_standby(session, copy.position, copy.end)
        write_tokens(cache, checked)
        cache.blocks, session.applied_step_id = session.request.blocks, control.step_id
        if session.state is SessionState.STANDBY:
            note_unsent(session.unsent_before, store, checked.layers, copy)
        if control.is_last:
            forget_unsent(cache, checked.layers, copy.first_tokens)
            self.sessions.arrived(session, is_idle=control.is_idle)
        return cache.num_tokens

    def _arriving(self, control: pb.HandoverTokens) -> HopSession[SessionCache]:
        return self.sessions.get_arriving(control.session_id, control.epoch, control.transfer_id, self.engine.clock())


def answer_to(asked: pb.Handover | pb.HandoverTokens, error: CorollaError | None = None) -> pb.HandoverAnswer:
    """The answer to an offer or a part, which refuses it if there is an error."""
    answer = pb.HandoverAnswer(session_id=asked.session_id, epoch=asked.epoch, transfer_id=asked.transfer_id)
    if error is not None:
        answer.reason, answer.message = error.reason, error.message
    return answer


def _checked(store: KVStore, layers: range, control: pb.HandoverTokens, payload: Buffer) -> CheckedCopy:
    """Checks the content of a part, and brings it to the device, in any thread."""
    if zlib.crc32(payload) != control.checksum:
        raise ChecksumMismatch("a part of a session was damaged on the way")
    copy = TokenCopy(
        control.position,
        control.num_tokens,
        tuple(control.first_tokens),
        payload,
        control.is_last or control.has_states,
    )
    if len(copy.first_tokens) == len(layers):
        return check_tokens(store, layers, copy)
    if (held := store.held_layers(layers)) == layers:
        copy = without_last_layer(store, layers, copy)
    return check_tokens(store, held, copy)
