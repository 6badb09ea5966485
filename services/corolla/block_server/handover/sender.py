"""Copies sessions to other block servers while they take steps: to hand them over, or to fill their standbys.

A handover pauses the session for its last part only; a copy to a standby never does. The parts travel on the stream to
the other block server (`HandoverLink`).
"""

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import ID_BYTES
from corolla.block_server.handover.plan import HandoverProgress
from corolla.block_server.hop_session import HopSession, OpenRequest, SessionEvent
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.cache.transfer import TokenCopy, read_tokens, state_bytes, token_bytes
from corolla.chassis.errors import ChecksumMismatch, HopUnavailable, MessageTooLarge, PositionGap
from corolla.chassis.status import from_reason
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.span import Span
from corolla.wire.stream import Connect, Stream, between_servers, connect
from corolla.wire.tensors import describe_prompts, to_payload

PART_BYTES = 4 << 20
PART_BYTES_OF_GPUS = 16 << 20
"""Each part waits for the iteration that runs, which takes a GPU longer than to copy the part."""
_MOST_BYTES_AT_ONCE: Final = 16 << 20
"""The most bytes of settled tokens that are read for a standby between two iterations, which wait for that."""
_ANSWER_TIMEOUT_S: Final = 5.0
_MOST_OF_STATES: Final = 16
_MOST_BETWEEN_STATES: Final = 256
"""The most tokens between two copies of recurrent states, which a recovery computes again one by one."""
# What a frame may have in addition to a part and to recurrent states.
_MARGIN_BYTES = 3 << 20
# A receiver that refuses a part for one of these reasons says how many tokens it has; the sender continues there.
_REPEATABLE = frozenset({PositionGap.reason, ChecksumMismatch.reason})


class _Part(NamedTuple):
    frame: pb.HandoverTokens
    payload: Buffer


_Reading = tuple[pb.HandoverTokens, Callable[[], TokenCopy]]
"""The frame of a part, without what only its copy tells, and a function that waits for the copy."""


class HandoverLink:
    """Sends offers and parts to one server and receives its answers. A session has one open request at a time."""

    def __init__(self, address: str, connect: Connect = connect) -> None:
        self.address = address
        self._connect = connect
        self._stream: Stream | None = None
        self._welcome: asyncio.Future[pb.Welcome] | None = None
        self._answers: dict[tuple[bytes, bytes], asyncio.Future[pb.HandoverAnswer]] = {}

    @asynccontextmanager
    async def connect(self, fingerprint: str) -> AsyncIterator[None]:
        """Holds the stream open within the context. If the stream breaks, requests raise HopUnavailable."""
        self._welcome = asyncio.get_running_loop().create_future()
        stream = self._connect(self.address, lambda _: self._receive)
        stream.ended.add_done_callback(lambda _: self._on_ended())
        stream.send(pb.Hello(fingerprint=fingerprint))
        self._stream = stream
        try:
            yield
        finally:
            stream.close()
            await asyncio.wait({stream.ended})

    @property
    def is_broken(self) -> bool:
        """The stream has ended, or was never connected."""
        return self._stream is None

    async def takes_prediction_layer(self) -> bool:
        """See `Welcome.takes_prediction_layer`. False if the stream broke, which the next request says."""
        if self._welcome is None:
            return False
        await asyncio.wait({self._welcome}, timeout=_ANSWER_TIMEOUT_S)
        return self._welcome.done() and self._welcome.result().takes_prediction_layer

    async def request(self, control: pb.Handover | pb.HandoverTokens, payload: Buffer = b"") -> pb.HandoverAnswer:
        """Sends one frame and waits for its answer. Raises HopUnavailable."""
        if self._stream is None:
            raise self._broken()
        key = control.session_id, control.transfer_id
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            self._stream.send(control, payload)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answered: pb.HandoverAnswer = await answer
                return answered
        except TimeoutError:
            raise HopUnavailable("a block server does not answer", self.address) from None
        finally:
            del self._answers[key]

    def send(self, control: pb.Close | pb.Truncate) -> None:
        """Sends a frame that has no answer."""
        if self._stream is not None:
            self._stream.send(control)

    def _receive(self, frame: Frame) -> None:
        if isinstance(frame.control, pb.Welcome) and self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(frame.control)
        elif isinstance(frame.control, pb.HandoverAnswer):
            # Servers of the release before name no transfer.
            named = frame.control.session_id, frame.control.transfer_id
            for (session_id, transfer_id), answer in self._answers.items():
                if (session_id, named[1] and transfer_id) == named and not answer.done():
                    answer.set_result(frame.control)

    def _on_ended(self) -> None:
        self._stream = None
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(pb.Welcome())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._broken())

    def _broken(self) -> HopUnavailable:
        return HopUnavailable("the stream to a block server broke", self.address)


@dataclass(eq=False, repr=False)
class HandoverSender:
    """Copies sessions of this server to other servers in parts. One part of a session travels, and one is copied.

    Args:
        max_part_tokens: the most tokens that a receiver takes in one part.
        max_part_bytes: the most bytes of keys and values of one part with several tokens.
    """

    span: Span
    sessions: SessionTable[SessionCache]
    engine: Engine
    _: KW_ONLY
    max_part_tokens: int
    max_part_bytes: int = PART_BYTES
    # Maps each session whose handover broke off to the receiver's address, and the transfer id and progress to
    # continue with.
    _begun: dict[bytes, tuple[str, bytes, HandoverProgress]] = field(init=False, default_factory=dict)

    async def send(self, session_id: bytes, version: int, link: HandoverLink) -> int:
        """Hands a session over. Afterwards the session takes no steps here; after a failure it continues here.

        Args:
            version: the version of the session (see `HopSession`) that is to be handed over.

        Returns:
            How many bytes of keys and values were sent.

        Raises:
            HopUnavailable: the link broke, or parts were refused too often. The next call for the same receiver
                continues after the tokens that have arrived.
            HopSessionLost: the session ended or was opened again during the handover.
            CorollaError: the receiver refused the session, and this is its reason. It keeps nothing of this handover.
        """
        session = self.sessions.in_version(session_id, version)
        request = session.request
        self._check_states(session)
        address, transfer_id, progress = self._begun.pop(session_id, ("", b"", HandoverProgress()))
        if address != link.address:
            transfer_id, progress = secrets.token_bytes(ID_BYTES), HandoverProgress()
            # The receiver may have pages of what is held now, and these tokens may change before it says so.
            session.cache.num_unchanged_tokens = session.cache.num_tokens
        is_taken = False
        try:
            offer, prompts = _offer(session, transfer_id)
            answer = await link.request(offer, prompts)
            if answer.reason:
                raise from_reason(answer.reason, answer.message)
            is_taken = True
            progress.begin(answer.num_tokens)
            layers = await self._sent_layers(session, link)
            num_bytes = await self._send(request, version, transfer_id, progress, link, layers)
            self.sessions.in_version(session_id, version)
            return num_bytes
        except BaseException as failure:
            if isinstance(failure, HopUnavailable):
                self._begun[session_id] = (link.address, transfer_id, progress)
            elif is_taken:
                # A receiver that refused the offer gets no Close: it may hold the session from another source.
                link.send(pb.Close(session_id=session_id, epoch=request.epoch))
            self.sessions.cancel_leaving(session_id, version)
            raise

    async def copy_settled(
        self, session: HopSession[SessionCache], transfer_id: bytes, progress: HandoverProgress, link: HandoverLink
    ) -> int:
        """Copies the next settled tokens of a session to its standby.

        It reads them all at once, in parts. A part by itself would wait for the iteration that runs, and the standby of
        a hop whose iterations are chunks of a prompt would fall behind by what a chunk has more than a part.

        Recurrent states go with the newest token, after so many tokens that they take at most `_MOST_OF_STATES` times
        the bytes of keys and values, and at the latest after `_MOST_BETWEEN_STATES`.

        Returns:
            How many bytes were sent.

        Raises:
            MessageTooLarge: the session's recurrent states do not fit into a frame.
            HopUnavailable: the link broke, or parts were refused too often.
            HopSessionLost: the session ended or was opened again.
            CorollaError: the standby refused the part, and this is its reason.
        """
        session_id, version = session.request.session_id, session.version
        layers = await self._sent_layers(session, link)

        def read() -> list[_Reading]:
            held, parts = self.sessions.in_version(session_id, version), list[_Reading]()
            while True:
                num_held, num_unchanged, most = self._state(held)
                num_settled = min(num_held, held.num_settled_tokens)
                start, num_tokens, _ = progress.next_part(num_settled, num_unchanged, most)
                end = start + num_tokens
                has_states = end == num_held and num_held >= self._states_due_at(held, progress)
                if has_states:
                    progress.states_at = num_held
                parts.append(self._read(held, layers, start, num_tokens, is_last=False, has_states=has_states))
                if end == num_settled or len(parts) * self.max_part_bytes >= _MOST_BYTES_AT_ONCE:
                    return parts

        self._check_states(session)
        num_bytes = 0
        for reading in await self.engine.copy(read):
            part = await asyncio.to_thread(_finished, *reading)
            part.frame.transfer_id = transfer_id
            answer = await link.request(part.frame, part.payload)
            self._note(answer, progress)
            if answer.reason:
                break  # the parts after it do not fit what the receiver has
            num_bytes += len(part.payload)
        return num_bytes

    def _states_due_at(self, session: HopSession[SessionCache], progress: HandoverProgress) -> int:
        """How many tokens a session has when its states are sent to its standby again."""
        store, layers = session.cache.store, self._layers(session)
        per_token = max(1, token_bytes(store, layers))
        interval = state_bytes(store, layers) // (_MOST_OF_STATES * per_token)
        return progress.states_at + min(max(1, interval), _MOST_BETWEEN_STATES)

    def _layers(self, session: HopSession[SessionCache]) -> range:
        return session.cache.store.held_layers(self.span.indices(session.request.blocks))

    async def _sent_layers(self, session: HopSession[SessionCache], link: HandoverLink) -> range:
        """The session's layers that the receiver takes: servers of the release before know no prediction block."""
        if await link.takes_prediction_layer():
            return self._layers(session)
        return self.span.indices(session.request.blocks)

    def _check_states(self, session: HopSession[SessionCache]) -> None:
        # All recurrent states of a session travel in one frame.
        max_state_bytes = between_servers().max_frame_bytes - self.max_part_bytes - _MARGIN_BYTES
        if state_bytes(session.cache.store, self._layers(session)) > max_state_bytes:
            raise MessageTooLarge("the recurrent states of a session are larger than a frame")

    def continue_with(self, session_id: bytes, address: str, transfer_id: bytes, progress: HandoverProgress) -> None:
        """Lets the next handover of a session to this receiver begin after the tokens that it holds as a standby."""
        self._begun[session_id] = (address, transfer_id, progress)

    async def _send(
        self,
        request: OpenRequest,
        version: int,
        transfer_id: bytes,
        progress: HandoverProgress,
        link: HandoverLink,
        layers: range,
    ) -> int:
        num_bytes = 0
        part: _Part | None = None
        while True:
            if part is None:
                part = await self._next_part(request.session_id, version, progress, layers)
            part.frame.transfer_id = transfer_id
            sent, following = await asyncio.gather(
                link.request(part.frame, part.payload),
                self._part_ahead(part, version, progress, layers),
                return_exceptions=True,  # neither goes on after the other
            )
            if isinstance(sent, BaseException):
                raise sent
            if isinstance(following, BaseException):
                raise following
            self._note(sent, progress)
            if not sent.reason:
                num_bytes += len(part.payload)
                if part.frame.is_last:
                    return num_bytes
            part = None if sent.reason else following
            await asyncio.sleep(0)

    def _note(self, answer: pb.HandoverAnswer, progress: HandoverProgress) -> None:
        if answer.reason and answer.reason not in _REPEATABLE:
            raise from_reason(answer.reason, answer.message)
        if not progress.answered(answer.num_tokens, taken=not answer.reason):
            raise HopUnavailable("a handover makes no progress")

    async def _next_part(self, session_id: bytes, version: int, progress: HandoverProgress, layers: range) -> _Part:
        """Copies the next part. Steps wait until the copy has begun, not until it ends."""

        def read() -> _Reading:
            session = self.sessions.in_version(session_id, version)
            part = progress.next_part(*self._state(session), is_idle=session.is_idle)
            return self._read(session, layers, *part)

        return await asyncio.to_thread(_finished, *await self.engine.copy(read))

    async def _part_ahead(self, part: _Part, version: int, progress: HandoverProgress, layers: range) -> _Part | None:
        """Copies the part after `part` while that travels; None if no part follows yet, or only the last one."""
        if part.frame.is_last:
            return None

        def read() -> _Reading | None:
            session = self.sessions.in_version(part.frame.session_id, version)
            ahead = progress.part_ahead(*self._state(session))
            return None if ahead is None else self._read(session, layers, *ahead, is_last=False)

        reading = await self.engine.copy(read)
        return None if reading is None else await asyncio.to_thread(_finished, *reading)

    def _state(self, session: HopSession[SessionCache]) -> tuple[int, int, int]:
        """How many tokens a session holds, how many have not changed, and the most tokens of its parts."""
        cache = session.cache
        num_bytes = max(1, token_bytes(cache.store, self._layers(session)))
        most = max(1, min(self.max_part_tokens, self.max_part_bytes // num_bytes))
        return cache.num_tokens, cache.num_unchanged_tokens, most

    def _read(
        self,
        session: HopSession[SessionCache],
        layers: range,
        start: int,
        num_tokens: int,
        is_last: bool,
        *,
        has_states: bool = False,
    ) -> _Reading:
        """Begins to copy a part, in the compute thread. The last part pauses the session, and always has states."""
        request, cache = session.request, session.cache
        has_states = has_states or is_last
        finish = read_tokens(cache, layers, start, num_tokens, has_states=has_states)
        cache.num_unchanged_tokens = start + num_tokens
        if is_last:
            session.apply(SessionEvent.LAST_PART_READ)
        frame = pb.HandoverTokens(
            session_id=request.session_id, epoch=request.epoch, position=start, num_tokens=num_tokens,
            is_last=is_last, is_idle=session.is_idle, has_states=has_states, step_id=session.applied_step_id,
        )  # fmt: skip
        return frame, finish


def _finished(frame: pb.HandoverTokens, finish: Callable[[], TokenCopy]) -> _Part:
    """Waits for the copy of a part, in any thread."""
    copy = finish()
    frame.first_tokens.extend(copy.first_tokens)
    frame.checksum = zlib.crc32(copy.payload)
    return _Part(frame, copy.payload)


def _offer(session: HopSession[SessionCache], transfer_id: bytes) -> tuple[pb.Handover, memoryview | bytes]:
    request = session.request
    offer = pb.Handover(
        session_id=request.session_id, epoch=request.epoch, tenant=request.tenant, client_id=request.client_id,
        max_tokens=request.max_tokens, blocks=request.blocks.to_message(),
        lease_ms=round(request.lease_s * 1000), transient=request.transient, keep_activations=request.keep_activations,
        transfer_id=transfer_id, capability=request.capability,
        adapter=None if request.adapter_version is None else request.adapter_version.to_message(),
        long_factors=request.long_factors, page_tokens=session.cache.pool.page_tokens, write_start=request.write_start,
    )  # fmt: skip
    if (text := session.cache.known_text) is not None:
        offer.text.num_tokens, offer.text.page_hashes = text.num_tokens, b"".join(text.hashes)
    if request.prompts is None:
        return offer, b""
    values = request.prompts.values
    offer.block_prompts.CopyFrom(describe_prompts(values))
    return offer, to_payload(values)
