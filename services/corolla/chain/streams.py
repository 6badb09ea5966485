"""The data plane as a client service sees it: one stream to each block server."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from corolla.chain.clock import time_s
from corolla.chain.handovers import Handovers
from corolla.chain.identity import SessionIdentity
from corolla.chain.lateness import TICK_S, Silences, silent_one
from corolla.chain.pending import HiddenStates, PendingReplies, RowFuture, discard, fail
from corolla.chain.placement import PlacementWatch
from corolla.chain.token_stream import TokenStream
from corolla.chassis.errors import (
    CorollaError,
    FingerprintMismatch,
    HopLate,
    HopLeaving,
    HopUnavailable,
    NotComputed,
    QueueFull,
)
from corolla.chassis.status import from_reason
from corolla.chassis.tasks import TaskGroup
from corolla.chassis.tracing.carriers import current_span_id
from corolla.trust.capabilities import Capabilities
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import Buffer, Frame
from corolla.wire.stream import Connect, Stream, StreamCause, StreamLimits, between_servers, connect

log = logging.getLogger(__name__)

_MOST_LOOKED_UP: Final = 64
"""The most moves of sessions to unknown servers for which the router is asked at the same time."""


@dataclass(slots=True)
class _Server:
    """The stream to a block server, and the future of the server's Welcome.

    Attributes:
        began_s: when the stream began.
        silences: how long the server was silent each time that it was asked whether it lives.
        is_asked: whether it is asked now.
    """

    stream: Stream
    welcome: asyncio.Future[pb.Welcome]
    began_s: float
    silences: Silences = field(default_factory=Silences)
    is_asked: bool = False


class DataPlane:
    """The streams of this process to block servers.

    A slow step and a dead server look the same from here. So the plane pings a silent server; a server that does not
    answer loses its stream, and all requests that wait for it fail at once. A healthy server answers pings between
    steps, and also during a long one.

    Args:
        tasks: the task group for this plane's own tasks; no other object uses it.
        limits: when a silent server is pinged, and when it is given up.
        open_timeout_s: how long a live server may take to open a session. Its event loop may answer pings while its
            compute thread is stuck.
        on_discarded: is called with the number of tokens that hops chose and that have no reader any more.
        capabilities: signs each request to open a session, for hops that demand it; None: requests are not signed.
        placement: names the servers that sessions may move to; None: sessions may move to any server.

    Attributes:
        newest_step_id: the greatest id of a step so far; opens are numbered with the steps.
        on_standby: is called with the id of a session, the address of a hop, and how many tokens the hop's standby
            holds, once it lacks few settled ones; 0: the hop has no standby for the session now.
        fetching: what waits until a server has copied a session elsewhere, by the session's id and the server's
            address; see `chain/fetches`. It gets the number of tokens there after each part, and None at the end.
    """

    def __init__(
        self,
        fingerprint: str,
        tasks: TaskGroup,
        limits: StreamLimits | None = None,
        open_timeout_s: float = 15.0,
        connect: Connect = connect,
        on_discarded: Callable[[int], None] = lambda num_tokens: None,
        capabilities: Capabilities | None = None,
        placement: PlacementWatch | None = None,
    ) -> None:
        self.client_id = secrets.token_bytes(16)
        self._fingerprint = fingerprint
        self._connect = connect
        self._limits = limits or between_servers()
        self._tasks = tasks
        self._servers: dict[str, _Server] = {}
        self.newest_step_id = 0
        self._open_timeout_s = open_timeout_s
        self._pending = PendingReplies(on_discarded)
        self._capabilities = capabilities
        self._placement = placement
        self._num_looked_up = 0
        self.handovers = Handovers(self._servers)
        self.on_load: Callable[[str, pb.HopLoad], None] = lambda address, load: None
        """Gets a server's address and its load when the server opens a session or refuses to."""
        self.on_standby: Callable[[bytes, str, int], None] = lambda session_id, address, num_tokens: None
        self.fetching: dict[tuple[bytes, str], Callable[[int | None], None]] = {}

    @property
    def num_pending(self) -> int:
        """How many steps and opens have no answer yet, plus the sessions whose tokens go round."""
        return len(self._pending)

    async def connect(self, address: str) -> pb.Welcome:
        """Makes sure that there is a stream to the server; returns its Welcome.

        Raises:
            HopUnavailable, FingerprintMismatch
        """
        server = self._servers.get(address) or self._begin(address)
        if server.welcome.done():
            return server.welcome.result()
        try:
            async with asyncio.timeout(self._limits.connect_s):
                return await asyncio.shield(server.welcome)
        except TimeoutError:
            raise HopUnavailable("a hop of the chain is not reachable", address) from None

    def welcome(self, address: str) -> pb.Welcome:
        """What a connected server said of itself; an empty Welcome of one that is gone."""
        server = self._servers.get(address)
        if server is None or not server.welcome.done() or server.welcome.cancelled() or server.welcome.exception():
            return pb.Welcome()
        return server.welcome.result()

    def _begin(self, address: str) -> _Server:
        welcome: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        stream = self._connect(address, lambda _: partial(self._receive, address), self._limits)
        stream.send(pb.Hello(client_id=self.client_id, fingerprint=self._fingerprint))
        server = self._servers[address] = _Server(stream, welcome, time_s())
        stream.ended.add_done_callback(lambda _: self._on_ended(address, server))
        return server

    async def _connect_ahead(self, address: str) -> None:
        with contextlib.suppress(CorollaError):  # a request that needs the server meets the same error
            await self.connect(address)

    async def open(self, address: str, request: pb.Open, payload: Buffer = b"") -> pb.Opened:
        """Opens a session on one hop. Raises the hop's error, or HopUnavailable.

        A hop that did not answer in time may still open the session later: the caller has to close it there.

        Args:
            payload: the embeddings that `request.block_prompts` describes.
        """
        await self.connect(address)
        number = self._next_number()
        answer = self._pending.add_open(number, address)
        try:
            request.request_id = number
            if self._capabilities is not None:
                self._capabilities.sign(request)
            self._send(address, request, payload)
            async with asyncio.timeout(self._open_timeout_s):
                return await answer
        except TimeoutError:
            raise HopUnavailable("a hop of the chain does not answer", address) from None
        finally:
            self._pending.remove_open(number)

    def step(
        self,
        hops: Sequence[common_pb2.Hop],
        rows: Sequence[pb.StepRow],
        hidden: HiddenStates | None = None,
        *,
        scratch_hops: int = 0,
        samples: bool = False,
    ) -> list[RowFuture]:
        """Sends a step through the chain. Returns one future for each of its rows, in order.

        Args:
            hidden: the inputs of the first block, `[num_tokens, hidden_size]`, one row after the other; None if the
                rows carry token ids.
            scratch_hops: bit `i` is set if hop `i` computes the rows in their scratch sessions.
            samples: whether the step belongs to a session whose tokens the last hop chooses.
        """
        step = pb.Step(rows=rows, scratch_hops=scratch_hops, blocks=hops[0].span, route=hops[1:], samples=samples)
        if hidden is None:
            return self._send_step(hops, step, b"")
        step.dtype, step.hidden_size = hidden.dtype, hidden.hidden_size
        return self._send_step(hops, step, hidden.payload)

    def begin_ring(
        self, hops: Sequence[common_pb2.Hop], row: pb.StepRow, credit_end: int, max_step_tokens: int
    ) -> TokenStream:
        """Sends the step with which a session's tokens begin to go round. The caller has to call `end_ring` in the end.

        Args:
            row: carries token ids, and asks for results of at least one of them.
            credit_end: see `grant`.
            max_step_tokens: the most tokens that every hop takes in one step.
        """
        addresses = frozenset(hop.address for hop in hops)
        stream = TokenStream(row.epoch, row.position, credit_end, addresses)
        self._pending.add_token_stream(row.session_id, stream)
        ring = pb.Ring(first_address=hops[0].address, credit_end=credit_end, max_step_tokens=max_step_tokens)
        step = pb.Step(
            client_id=self.client_id, rows=[row], blocks=hops[0].span, route=hops[1:], samples=True, ring=ring,
            span_id=current_span_id(),
        )  # fmt: skip
        try:
            self._send(hops[0].address, step)
        except HopUnavailable as error:
            stream.end(error)
        except BaseException:
            self._pending.remove_token_stream(row.session_id, stream)
            raise
        if lost := self._lost(hops[1:]):
            stream.end(lost)
        return stream

    def grant(self, hop: common_pb2.Hop, identity: SessionIdentity, stream: TokenStream, credit_end: int) -> None:
        """Lets steps of a session begin at positions below `credit_end`."""
        stream.credit_end = credit_end
        try:
            self._send(hop.address, pb.Credit(session_id=identity.session_id, epoch=identity.epoch, end=credit_end))
        except HopUnavailable as error:
            stream.end(error)

    def renew(self, hops: Iterable[common_pb2.Hop], identity: SessionIdentity, max_tokens: int, lease_ms: int) -> None:
        """Sends hops a fresh capability for a session, if they demand them: no server takes it over with an old one."""
        if (capabilities := self._capabilities) is None:
            return
        for hop in hops:
            asked = pb.Open(
                session_id=identity.session_id, epoch=identity.epoch, tenant=identity.tenant, blocks=hop.span,
                max_tokens=max_tokens, lease_ms=lease_ms,
            )  # fmt: skip
            capabilities.sign(asked)
            fresh = pb.Credit(session_id=asked.session_id, epoch=asked.epoch, capability=asked.capability)
            self.notify(hop.address, fresh)

    def end_ring(self, session_id: bytes, stream: TokenStream) -> None:
        """Stops reading a session's tokens. The hops stop when the turn ends or the session is opened again."""
        self._pending.remove_token_stream(session_id, stream)

    def has_ring(self, hops: Sequence[common_pb2.Hop]) -> bool:
        """Tokens of some session go round these hops."""
        return self._pending.has_token_stream(frozenset(hop.address for hop in hops))

    def _lost(self, hops: Iterable[common_pb2.Hop]) -> HopUnavailable | None:
        """A HopUnavailable for the first hop that has no stream for its answers; None if all hops have one."""
        for hop in hops:
            if hop.address not in self._servers:
                return HopUnavailable("a hop of the chain was lost", hop.address)
        return None

    def resend(
        self, source: common_pb2.Hop, hops: Sequence[common_pb2.Hop], rows: Sequence[pb.StepRow], scratch_hops: int
    ) -> list[RowFuture]:
        """Sends a step whose inputs are boundary activations that `source` has kept. See `step`."""
        step = pb.Step(rows=rows, scratch_hops=scratch_hops, blocks=source.span, route=hops)
        return self._send_step([source, *hops], step, None)

    def _send_step(self, hops: Sequence[common_pb2.Hop], step: pb.Step, payload: Buffer | None) -> list[RowFuture]:
        step.step_id = number = self._next_number()
        step.client_id, step.span_id = self.client_id, current_span_id()
        futures = self._pending.add_step(number, step.rows, frozenset(hop.address for hop in hops))
        try:
            if payload is None:
                self._send(hops[0].address, pb.Resend(step=step))
            else:
                self._send(hops[0].address, step, payload)
        except HopUnavailable as error:
            fail(futures, error)
            return futures
        except BaseException:
            discard(futures)
            raise
        if lost := self._lost(hops[1:]):
            fail(futures, lost)
        return futures

    def _next_number(self) -> int:
        self.newest_step_id += 1
        return self.newest_step_id

    def notify(self, address: str, control: pb.Close | pb.Truncate | pb.Holds | pb.Standby | pb.Credit) -> None:
        """Sends a frame that has no answer. A server that is gone has nothing left to free."""
        server = self._servers.get(address)
        if server is not None:
            with contextlib.suppress(QueueFull):
                server.stream.send(control)

    def close_session(self, hops: Iterable[common_pb2.Hop], identity: SessionIdentity) -> None:
        """Frees a session on some hops. A hop that has opened it in a later epoch keeps it."""
        for hop in hops:
            self.notify(hop.address, pb.Close(session_id=identity.session_id, epoch=identity.epoch))

    def ask(self, addresses: Iterable[str]) -> None:
        """Pings the servers that are not asked already, and counts the ticks until they are heard."""
        for address in addresses:
            server = self._servers.get(address)
            if server is not None and not server.is_asked:  # the loss of a server has failed what waits for it
                server.is_asked = True
                self._tasks.start(self._listen(server), "silence of a server")

    def awaits(self, addresses: Iterable[str]) -> bool:
        """One of these servers was asked and has not been heard since."""
        return any(address in self._servers and self._servers[address].is_asked for address in addresses)

    async def _listen(self, server: _Server) -> None:
        asked_s = time_s()
        with contextlib.suppress(QueueFull):  # a server that reads nothing does not answer either
            server.stream.send(pb.Ping())
        try:
            while server.stream.heard_s < asked_s and not server.stream.ended.done():
                await asyncio.sleep(TICK_S)
                server.silences.tick()
        finally:
            server.silences.end()
            server.is_asked = False

    def late_hop(self, addresses: Iterable[str]) -> HopLate | None:
        """The failure of one of these servers that is silent for too long; None if no single server is to blame."""
        guarded = {address: self._servers[address].silences for address in addresses if address in self._servers}
        address = silent_one(guarded, (each.silences for each in self._servers.values()))
        if address is None:
            return None
        failure = HopLate("a hop of the chain is late", address)
        failure.is_repeated = self._servers[address].silences.was_long
        return failure

    async def close(self) -> None:
        await self._tasks.close()
        streams = [server.stream for server in self._servers.values()]
        for stream in streams:
            stream.close()
        if streams:
            await asyncio.wait([stream.ended for stream in streams])

    def _send(self, address: str, control: pb.Open | pb.Step | pb.Resend | pb.Credit, payload: Buffer = b"") -> None:
        server = self._servers.get(address)
        if server is None:
            raise HopUnavailable("a hop of the chain is not reachable", address)
        try:
            server.stream.send(control, payload)
        except QueueFull:
            raise HopUnavailable("a hop of the chain does not keep up", address) from None

    def _on_ended(self, address: str, server: _Server) -> None:
        """Fails everything that waits for an answer from a server whose stream ended."""
        end = server.stream.ended.result()
        error: CorollaError = HopUnavailable("a hop of the chain was lost", address)
        if end.cause is StreamCause.SILENT:
            error = HopUnavailable("a hop of the chain does not answer", address)
        elif isinstance(end.error, FingerprintMismatch):
            error = end.error
        if end.cause is not StreamCause.CLOSED:
            reason = end.error.reason if end.error is not None else ""
            facts = {"address": address, "cause": end.cause.value, "reason": reason}
            log.warning("stream to a block server ended", extra=facts)
        if self._servers.get(address) is server:
            del self._servers[address]
        if not server.welcome.done():
            server.welcome.set_exception(error)
            server.welcome.exception()  # marks it as seen: there may be no task that waits for it
        self.handovers.on_news()
        self._pending.on_stream_lost(address, error)
        for (_, holder), tell in self.fetching.items():
            if holder == address:
                tell(None)

    def _receive(self, address: str, frame: Frame) -> None:
        server, control = self._servers.get(address), frame.control
        match control:
            case pb.Result():
                self._pending.on_result(control, frame.payload)
            case pb.Opened():
                self._hear_load(address, control)
                self._pending.on_opened(control)
            case pb.Fault():
                self._hear_load(address, control)
                error = _error_of(control, address)
                if isinstance(error, HopLeaving):
                    self.handovers.on_step_refused(address)
                self._pending.on_fault(control, error)
            case pb.Standby():
                self._on_standby(control, address)
            case pb.Moved():
                self._on_moved(control, address)
            case pb.Welcome():
                if server is not None and not server.welcome.done():
                    server.silences = Silences(time_s() - server.began_s)
                    server.welcome.set_result(control)
            case _:
                log.warning("a block server sent a frame of an unexpected kind")

    def _on_standby(self, control: pb.Standby, address: str) -> None:
        tell = self.fetching.get((control.session_id, address))
        if tell is not None:
            tell(control.num_tokens if control.after_each_part else None)
        elif not control.after_each_part:
            self.on_standby(control.session_id, address, control.num_tokens)

    def _hear_load(self, address: str, answer: pb.Opened | pb.Fault) -> None:
        if answer.HasField("load"):
            self.on_load(address, answer.load)

    def _on_moved(self, moved: pb.Moved, address: str) -> None:
        is_known = self._placement is None or self._placement.has_hop(moved.hop)
        if is_known or not moved.HasField("hop"):
            self._note_move(moved, address)
        elif self._num_looked_up < _MOST_LOOKED_UP:
            self._tasks.start(self._look_up(moved, address), "look for a server")

    def _note_move(self, moved: pb.Moved, address: str) -> None:
        self.handovers.on_moved(moved, address)
        if moved.HasField("hop") and moved.hop.address not in self._servers:
            # The session's owner opens or closes it there soon.
            self._tasks.start(self._connect_ahead(moved.hop.address), "connection to a server")

    async def _look_up(self, moved: pb.Moved, address: str) -> None:
        """Handles the move of a session to a server that this placement does not know.

        If the router does not know the server either, the move is recorded without a hop, and the session is replayed.
        """
        self._num_looked_up += 1
        try:
            if self._placement is not None and not await self._placement.will_name(moved.hop):
                log.warning("a session moved to a server that the placement does not name", extra={"address": address})
                moved.ClearField("hop")
        finally:
            self._num_looked_up -= 1
        self._note_move(moved, address)


def _error_of(fault: pb.Fault, sender: str) -> CorollaError:
    metadata = dict(fault.metadata)
    if fault.address:
        metadata["address"] = fault.address
    error = from_reason(fault.reason, fault.message, metadata)
    if isinstance(error, NotComputed | HopLeaving):
        error.address = sender
    elif isinstance(error, HopUnavailable) and error.address != sender:
        error.reporter = sender
    return error
