"""Copies sessions to other block servers while they take steps: to hand them over, or to fill their standbys.

A handover pauses the session for its last part only; a copy to a standby never does. One part of a session travels at a
time, on a stream to the other block server (`HandoverLink`).
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
from corolla.block_server.hop_session import HopSession, SessionEvent
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
MOST_BYTES_AT_ONCE: Final = 16 << 20
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
    """Sends offers and parts to one server and receives its answers. A transfer has one open request at a time."""

    def __init__(self, address: str, connect: Connect = connect) -> None:
        self.address = address
        self._connect = connect
        self._stream: Stream | None = None
        self._num_users = 0
        self._answers: dict[tuple[bytes, bytes], asyncio.Future[pb.HandoverAnswer]] = {}

    @asynccontextmanager
    async def connect(self, fingerprint: str) -> AsyncIterator[None]:
        """Holds the stream open within the context, which may be entered again meanwhile.

        If the stream breaks, requests raise HopUnavailable.
        """
        if not self._num_users:
            self._stream = self._connect(self.address, lambda _: self._receive)
            self._stream.ended.add_done_callback(lambda _: self._on_ended())
            self._stream.send(pb.Hello(fingerprint=fingerprint))
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users and (stream := self._stream) is not None:
                self._stream = None
                stream.close()
                await asyncio.wait({stream.ended})

    @property
    def is_broken(self) -> bool:
        """The stream has ended, or was never connected."""
        return self._stream is None

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
        if isinstance(frame.control, pb.HandoverAnswer):
            answer = self._answers.get((frame.control.session_id, frame.control.transfer_id))
            if answer is not None and not answer.done():
                answer.set_result(frame.control)

    def _on_ended(self) -> None:
        self._stream = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._broken())

    def _broken(self) -> HopUnavailable:
        return HopUnavailable("the stream to a block server broke", self.address)


class HandoverLinks:
    """The streams to other servers, one for each address in use.

    Handovers and copies to standbys use different ones: a copy that ends without its answer leaves that on its stream,
    and the handover of the same session goes on with the same transfer id.

    Args:
        fingerprint: the weights and protocol of this server, which the others share.
    """

    def __init__(self, connect: Connect, fingerprint: str) -> None:
        self._connect = connect
        self._fingerprint = fingerprint
        self._links: dict[str, HandoverLink] = {}

    @asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[HandoverLink]:
        """The stream to a server, which stays open within the context."""
        link = self._links.get(address)
        if link is None or link.is_broken:
            link = self._links[address] = HandoverLink(address, self._connect)
        try:
            async with link.connect(self._fingerprint):
                yield link
        finally:
            if link.is_broken and self._links.get(address) is link:
                del self._links[address]


@dataclass(eq=False, repr=False)
class HandoverSender:
    """Copies sessions of this server to other servers in parts.

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

            def read() -> _Reading:
                held = self.sessions.in_version(session_id, version)
                start, num_tokens, is_last = progress.next_part(*self._state(held), is_idle=held.is_idle)
                return self._read(held, start, num_tokens, is_last=is_last, has_states=is_last)

            num_bytes, is_last = 0, False
            while not is_last:
                part = await self._send_part(await self.engine.copy(read), transfer_id, progress, link)
                if part is not None:
                    num_bytes, is_last = num_bytes + len(part.payload), part.frame.is_last
                await asyncio.sleep(0)
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
    ) -> tuple[int, int]:
        """Copies the next settled tokens of a session to its standby.

        It reads them all at once, in parts. A part by itself would wait for the iteration that runs, and the standby of
        a hop whose iterations are chunks of a prompt would fall behind by what a chunk has more than a part.

        Recurrent states go with the newest token, after so many tokens that they take at most `_MOST_OF_STATES` times
        the bytes of keys and values, and at the latest after `_MOST_BETWEEN_STATES`.

        Returns:
            How many bytes the standby took, and how many of them were recurrent states.

        Raises:
            MessageTooLarge: the session's recurrent states do not fit into a frame.
            HopUnavailable: the link broke, or parts were refused too often.
            HopSessionLost: the session ended or was opened again.
            CorollaError: the standby refused the part, and this is its reason.
        """
        session_id, version = session.request.session_id, session.version

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
                parts.append(self._read(held, start, num_tokens, is_last=False, has_states=has_states))
                if end == num_settled or len(parts) * self.max_part_bytes >= MOST_BYTES_AT_ONCE:
                    return parts

        self._check_states(session)
        num_bytes = num_state_bytes = 0
        for reading in await self.engine.copy(read):
            part = await self._send_part(reading, transfer_id, progress, link)
            if part is None:
                break  # the parts after it do not fit what the receiver has
            num_bytes += len(part.payload)
            if part.frame.has_states:
                num_state_bytes += state_bytes(session.cache.store, self._layers(session))
        return num_bytes, num_state_bytes

    def _states_due_at(self, session: HopSession[SessionCache], progress: HandoverProgress) -> int:
        """How many tokens a session has when its states are sent to its standby again."""
        store, layers = session.cache.store, self._layers(session)
        per_token = max(1, token_bytes(store, layers))
        interval = state_bytes(store, layers) // (_MOST_OF_STATES * per_token)
        return progress.states_at + min(max(1, interval), _MOST_BETWEEN_STATES)

    def _layers(self, session: HopSession[SessionCache]) -> range:
        store = session.cache.store
        return store.held_layers(store.layers_of(self.span, session.request.blocks))

    def _check_states(self, session: HopSession[SessionCache]) -> None:
        # All recurrent states of a session travel in one frame.
        max_state_bytes = between_servers().max_frame_bytes - self.max_part_bytes - _MARGIN_BYTES
        if state_bytes(session.cache.store, self._layers(session)) > max_state_bytes:
            raise MessageTooLarge("the recurrent states of a session are larger than a frame")

    def continue_with(self, session_id: bytes, address: str, transfer_id: bytes, progress: HandoverProgress) -> None:
        """Lets the next handover of a session to this receiver begin after the tokens that it holds as a standby."""
        self._begun[session_id] = (address, transfer_id, progress)

    async def _send_part(
        self, reading: _Reading, transfer_id: bytes, progress: HandoverProgress, link: HandoverLink
    ) -> _Part | None:
        """Sends a part. Returns None if another one has to follow in its place.

        Steps wait until its copy has begun, not until that ends.
        """
        part = await asyncio.to_thread(_finished, *reading)
        part.frame.transfer_id = transfer_id
        answer = await link.request(part.frame, part.payload)
        if answer.reason and answer.reason not in _REPEATABLE:
            raise from_reason(answer.reason, answer.message)
        if not progress.answered(answer.num_tokens, taken=not answer.reason):
            raise HopUnavailable("a handover makes no progress")
        return None if answer.reason else part

    def _state(self, session: HopSession[SessionCache]) -> tuple[int, int, int]:
        """How many tokens a session holds, how many have not changed, and the most tokens of its parts."""
        cache = session.cache
        num_bytes = max(1, token_bytes(cache.store, self._layers(session)))
        most = max(1, min(self.max_part_tokens, self.max_part_bytes // num_bytes))
        return cache.num_tokens, cache.num_unchanged_tokens, most

    def _read(
        self, session: HopSession[SessionCache], start: int, num_tokens: int, *, is_last: bool, has_states: bool
    ) -> _Reading:
        """Begins to copy a part, in the compute thread. The last part pauses the session."""
        request, cache = session.request, session.cache
        finish = read_tokens(cache, self._layers(session), start, num_tokens, has_states=has_states)
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
