"""Serves the streams of callers, and BlockService: it checks frames and hands them to the engine."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from corolla.block_server.adapters import Adapters
from corolla.block_server.beginnings import named_in
from corolla.block_server.boundary_activations import BoundaryActivations
from corolla.block_server.engine import Engine
from corolla.block_server.frame_checks import ID_BYTES, FrameChecks, Identity
from corolla.block_server.handover.receiver import HandoverReceiver, answer_to
from corolla.block_server.handover.standbys import Standbys
from corolla.block_server.hop_session import OpenRequest, SessionState
from corolla.block_server.meetings import Meetings
from corolla.block_server.page_returns import PageReturns
from corolla.block_server.part_sender import PartSender
from corolla.block_server.peers import Peer, PeerTable, fill_fault, step_fault
from corolla.block_server.pending_opens import PendingOpens, takes_a_while
from corolla.block_server.row_sampling import NOTHING_SHARED, SessionSampler, SharedBySamplers
from corolla.block_server.scheduler import QueuedStep
from corolla.block_server.sessions import SessionTable
from corolla.block_server.step_admission import StepWork
from corolla.cache.store import KVStore, SessionCache
from corolla.chassis import audit, failpoints
from corolla.chassis.audit import Caller
from corolla.chassis.errors import (
    AdapterNotLoaded,
    CorollaError,
    DeadlineExceeded,
    FingerprintMismatch,
    MalformedMessage,
    RoleDenied,
)
from corolla.chassis.handlers import Call
from corolla.chassis.lifecycle import ask_to_stop
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.rpc_server import RpcServer
from corolla.chassis.tasks import TaskGroup
from corolla.trust.authorisation import check_frame
from corolla.trust.capabilities import Capabilities
from corolla.trust.workload import Role
from corolla.v1 import admin_pb2
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import Buffer, Frame
from corolla.wire.network import Network
from corolla.wire.stream import Receiver, Stream, StreamEnd

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
_FAREWELL_S: Final = 1.0
_ADMIN_HOST: Final = "127.0.0.1"
_ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@dataclass(eq=False, repr=False)
class BlockServicer:
    """Takes streams (`accept`) and serves `BlockService`. Every frame is checked before it costs memory or time.

    Args:
        shared: objects that all samplers of this server use.
        count_error: is called with the reason of each error that ended a stream.
        capabilities: verifies who opens sessions of the model; None without mutual TLS.
        adapters: loads the adapters of sessions; None: sessions cannot use adapters.
        num_heartbeats: counts the heartbeats that the server has sent.
        standbys: copies sessions to their standbys; None: this server neither has standbys nor is one.
        meetings: answers servers that want to know whether this one reaches them; None: they get no answer.
        part_sender: gives other block servers what they lack of the model's files; None: this server shares no files.
    """

    identity: Identity
    engine: Engine
    sessions: SessionTable[SessionCache]
    outputs: BoundaryActivations
    peers: PeerTable
    store: KVStore
    receiver: HandoverReceiver
    tasks: TaskGroup
    shared: SharedBySamplers = NOTHING_SHARED
    count_error: Callable[[str], None] = lambda reason: None
    capabilities: Capabilities | None = None
    adapters: Adapters | None = None
    num_heartbeats: Callable[[], int] = lambda: 0
    standbys: Standbys | None = None
    meetings: Meetings | None = None
    part_sender: PartSender | None = None
    _checks: FrameChecks = field(init=False)
    _pending_opens: PendingOpens = field(init=False)
    _page_returns: PageReturns = field(init=False)
    _handlers: dict[type, Callable[[Any, Buffer, Peer], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._checks = FrameChecks(self.identity, self.shared, self.capabilities)
        self._pending_opens = PendingOpens(self.tasks, self.shared.grammars)
        self._page_returns = PageReturns(self.sessions, self.store, self.engine, self.tasks)
        self._handlers = {
            pb.Open: self._open,
            pb.Step: self._step,
            pb.Resend: self._resend,
            pb.Close: self._close,
            pb.Truncate: self._truncate,
            pb.Holds: self._holds,
            pb.Standby: self._standby,
            pb.Next: self._next,
            pb.Credit: self._credit,
            pb.Handover: self._handover,
            pb.HandoverTokens: self._handover_tokens,
            pb.Meet: self._meet,
            pb.Fetch: self._fetch,
        }

    def accept(self, stream: Stream) -> Receiver:
        """Takes a new connection. A caller sends Hello first, then frames in any number and order."""
        peer: Peer | None = None
        no_hello = DeadlineExceeded("the caller did not send Hello in time")
        timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, stream.fail, no_hello)

        def receive(frame: Frame) -> None:
            nonlocal peer
            if isinstance(frame.control, pb.GoAway) and peer is not None:
                # Callers of earlier versions also send a GoAway that is not the last frame. Their streams do not move.
                if frame.control.is_last:
                    peer.go_over()
            elif peer is not None:
                self._handle(frame, peer)
            elif isinstance(frame.control, pb.Hello):
                peer = self._welcome(frame.control, stream)
                timer.cancel()
            else:
                raise MalformedMessage("frame", "a stream begins with Hello")

        def on_ended(ended: "asyncio.Future[StreamEnd]") -> None:
            timer.cancel()
            error = ended.result().error
            if error is not None:
                self.count_error(error.reason)
                log.warning("a stream failed", extra={"reason": error.reason})
            if peer is not None and peer.lose(stream):
                self.peers.remove(peer)
                self._pending_opens.cancel_of(peer)
                if peer.client_id:
                    self.engine.between_iterations(partial(self._forget, peer))

        stream.ended.add_done_callback(on_ended)
        return receive

    async def GetStatus(self, request: pb.GetBlockServerStatusRequest, call: Call[Caller]) -> pb.BlockServerStatus:
        """Answers with what the server holds now."""
        identity, pool = self.identity, self.sessions.pool
        return pb.BlockServerStatus(
            server_id=identity.server_id,
            span=identity.span.to_message(),
            model=identity.model,
            fingerprint=identity.fingerprint,
            dtype=identity.dtype_name,
            num_sessions=len(self.sessions),
            num_running_sessions=self.sessions.num_running,
            num_pages=pool.num_pages,
            num_free_pages=pool.num_available,
            num_cached_pages=pool.num_cached,
            page_tokens=pool.page_tokens,
            num_queued_steps=len(self.engine.scheduler),
            adapters=[version.to_message() for version in self.adapters.versions] if self.adapters else (),
            adapter_bytes=self.adapters.nbytes if self.adapters else 0,
        )

    def _welcome(self, hello: pb.Hello, stream: Stream) -> Peer:
        identity = self.identity
        if hello.fingerprint != identity.fingerprint:
            raise FingerprintMismatch("this server holds other weights or speaks another protocol version")
        for name in ("client_id", "stream_id"):
            if len(getattr(hello, name)) not in (0, ID_BYTES):
                raise MalformedMessage(name, f"must have {ID_BYTES} bytes")
        peer = Peer(hello.client_id, stream, hello.stream_id)
        if peer.workload is not None and (peer.workload.role is Role.BLOCK) == bool(peer.client_id):
            raise RoleDenied("block servers have no client id, and all other callers have one")
        known = self.peers.get(hello.client_id)
        if known is not None and known.workload != peer.workload:
            raise RoleDenied("the client id belongs to another caller")
        known_peer = self.peers.named(hello.stream_id)
        if known_peer is None:
            self.peers.add(peer)
        elif (known_peer.client_id, known_peer.workload) != (peer.client_id, peer.workload):
            raise RoleDenied("the stream that is to move here belongs to another caller")
        else:
            known_peer.expect(stream)
        stream.send(
            pb.Welcome(
                server_id=identity.server_id,
                span=identity.span.to_message(),
                dtype=identity.dtype,
                max_tokens_per_frame=identity.max_tokens_per_frame,
                page_tokens=identity.prefix_page_tokens,
                has_draft_model=self.shared.draft_model is not None,
                takes_stream_ids=True,
                takes_standbys=self.standbys is not None,
                cuts_are_equal=identity.cuts_are_equal,
                keeps_states=identity.keeps_states,
            )
        )
        return known_peer or peer

    def _handle(self, frame: Frame, peer: Peer) -> None:
        kind = type(frame.control)
        handler = self._handlers.get(kind)
        if handler is None:
            raise MalformedMessage("frame", "must be of a kind that callers may send")
        if peer.workload is not None:
            check_frame(kind, peer.workload)
        handler(frame.control, frame.payload, peer)

    def _open(self, control: pb.Open, payload: Buffer, peer: Peer) -> None:
        self._pending_opens.cancel(control.session_id, control.epoch)

        def refuse(error: CorollaError) -> None:
            _audit("open", error, peer)
            fault = pb.Fault(request_id=control.request_id, client_id=peer.client_id, load=self._load())
            peer.send(fill_fault(fault, error))

        try:
            request = self._checks.open_request(control, payload, peer)

            def open_soon(sampler: SessionSampler | None = None) -> None:
                self.engine.between_iterations(
                    partial(self._open_session, control, replace(request, sampler=sampler), peer, refuse)
                )

            make = self._checks.sampler if control.HasField("sampler") else None
            is_loaded = self._has_adapter(request) and not self._page_returns.names(request)
            if is_loaded and not takes_a_while(control.sampler):
                open_soon(None if make is None else make(control))
            else:
                self._pending_opens.start(control, peer, make, open_soon, refuse, partial(self._prepare, request))
        except CorollaError as error:
            refuse(error)

    def _open_session(
        self, control: pb.Open, request: OpenRequest, peer: Peer, refuse: Callable[[CorollaError], None]
    ) -> None:
        failpoints.passed("before_open")
        try:
            if self.adapters is not None and request.adapter_version is not None:
                request = replace(request, adapter=self.adapters.take(request.adapter_version, request.tenant))
            opened = self.sessions.open_standby if request.standby_transfer_id else self.sessions.open
            session = opened(request, self.engine.clock())
        except CorollaError as error:
            refuse(error)
            return
        kept_start, kept_end = self.outputs.range(control.session_id)
        peer.send(
            pb.Opened(
                request_id=control.request_id,
                session_id=control.session_id,
                epoch=control.epoch,
                num_cached_tokens=session.cache.num_tokens,
                min_position=session.cache.min_position,
                kept_start=kept_start,
                kept_end=kept_end,
                common_end=session.cache.common_end,
                step_id=session.applied_step_id,
                load=self._load(),
            )
        )
        failpoints.passed("after_open")

    def _load(self) -> pb.HopLoad:
        return pb.HopLoad(
            num_sessions=len(self.sessions),
            max_session_tokens=self.sessions.max_session_tokens,
            heartbeat_number=self.num_heartbeats(),
        )

    def _has_adapter(self, request: OpenRequest) -> bool:
        version = request.adapter_version
        return version is None or (self.adapters is not None and self.adapters.has(version))

    async def _prepare(self, request: OpenRequest) -> None:
        """Returns when adapter and kept pages of the session's text are there. Raises as `Adapters.load` does."""
        await self._load_adapter(request)
        await self._page_returns.bring_back(request)

    async def _load_adapter(self, request: OpenRequest) -> None:
        """Returns when the server has the adapter that `request` asks for. Raises as `Adapters.load` does."""
        if request.adapter_version is None:
            return
        if self.adapters is None:
            raise AdapterNotLoaded("a block server accepts no adapters; the operator can set COROLLA_ADAPTERS_MIB")
        await self.adapters.load(request.adapter_version, request.tenant)

    def _step(self, step: pb.Step, payload: Buffer, peer: Peer) -> None:
        try:
            self.engine.submit(self._queued_step(step, payload, peer))
        except CorollaError as error:
            if peer.client_id in (b"", step.client_id):
                self.peers.send_faults(step, error, step.rows, peer)
            else:
                # A caller that uses another client's id gets the fault: that client may have a step with this id.
                peer.send(step_fault(step, error, step.rows, step.client_id))

    def _next(self, message: pb.Next, payload: Buffer, peer: Peer) -> None:
        try:
            self._checks.next_rows(message, peer)
        except CorollaError as error:
            self.peers.send_faults(message, error, message.rows)
            return
        self.engine.first_hop.on_next(message)

    def _credit(self, credit: pb.Credit, payload: Buffer, peer: Peer) -> None:
        held = self.sessions.get(credit.session_id)
        if credit.HasField("capability") and held is not None and held.request.epoch == credit.epoch:
            try:
                held.request = self._checks.renewed(held.request, credit.capability, peer)
            except RoleDenied as error:
                _audit("renewal", error, peer)
        self.engine.last_hop.on_credit(credit, peer)

    def _fetch(self, fetch: pb.Fetch, payload: Buffer, peer: Peer) -> None:
        if self.part_sender is None or peer.client_id:
            raise MalformedMessage("fetch", "must come from a block server, to one that shares the model's files")
        self.part_sender.ask(fetch, peer)

    def _resend(self, control: pb.Resend, payload: Buffer, peer: Peer) -> None:
        step = control.step
        try:
            self._checks.step_blocks(step, peer)
            self._checks.rows(step)
            self._checks.resent(step)
        except CorollaError as error:
            peer.send(step_fault(step, error, step.rows, step.client_id))
            return
        step.dtype, step.hidden_size = self.identity.dtype, self.identity.hidden_size
        # The outputs are sent after the opens that came before this frame, and not during an iteration.
        self.engine.between_iterations(lambda: self.engine.resend(StepWork(step, b"", peer)))

    def _queued_step(self, step: pb.Step, payload: Buffer, peer: Peer) -> QueuedStep[StepWork]:
        blocks = self._checks.step_blocks(step, peer)
        rows = self._checks.rows(step)
        # Bit 0 stands for this hop.
        session_ids = self._checks.scratch_ids(step) if step.scratch_hops & 1 else rows.session_ids
        # An unreadable step is refused here, before it gets into a batch with other steps.
        self._checks.inputs(step, payload, rows.num_tokens)
        tenant_tokens = self.sessions.tenant_tokens(step.rows)
        return QueuedStep(session_ids, tenant_tokens, rows.is_decode, blocks, StepWork(step, payload, peer))

    def _close(self, control: pb.Close, payload: Buffer, peer: Peer) -> None:
        self._pending_opens.cancel(control.session_id, control.epoch)
        self._change(control.session_id, peer, partial(self.sessions.end, control.session_id, control.epoch))

    def _truncate(self, control: pb.Truncate, payload: Buffer, peer: Peer) -> None:
        self._pending_opens.cancel(control.session_id, control.epoch)
        truncate = partial(
            self.sessions.truncate, control.session_id, control.epoch, control.position, idle=control.idle
        )
        self._change(control.session_id, peer, truncate)

    def _change(self, session_id: bytes, peer: Peer, change: Callable[[], None]) -> None:
        """Changes a session between two iterations, if the peer may."""

        def run() -> None:
            if self._has_say(session_id, peer):
                change()

        self.engine.between_iterations(run)

    def _has_say(self, session_id: bytes, peer: Peer) -> bool:
        """The peer may change the session.

        A client may change the sessions of its owner. The server that handed a session over may change it until the
        client has opened it here, in any epoch. If the session is not held here, any peer may.
        """
        held = self.sessions.get(session_id)
        if held is None:
            return True
        if peer.client_id:
            return held.request.owner == peer.owner
        return held.state is not SessionState.RUNNING and held.request.sender == peer.name

    def _holds(self, control: pb.Holds, payload: Buffer, peer: Peer) -> None:
        hashes, beginnings = self._checks.page_hashes(control.text), named_in(control, peer.workload)
        set_hashes = partial(self.sessions.set_page_hashes, control.session_id, control.epoch, hashes, beginnings)
        self._change(control.session_id, peer, set_hashes)

    def _standby(self, control: pb.Standby, payload: Buffer, peer: Peer) -> None:
        self._checks.standby(control)
        if self.standbys is not None:
            self._change(control.session_id, peer, partial(self.standbys.name, control))

    def _handover(self, control: pb.Handover, payload: Buffer, peer: Peer) -> None:
        try:
            request = self._checks.handover_request(control, payload, peer)
        except RoleDenied as error:
            # The stream goes on: an honest sender may offer one session with an expired capability and then others.
            _audit("handover", error, peer)
            peer.send(answer_to(control, error))
            return
        self.tasks.start(self._take_offer(request, control, peer), "offer of a session")

    async def _take_offer(self, request: OpenRequest, control: pb.Handover, peer: Peer) -> None:
        """Takes a session over once its adapter is loaded, or refuses it."""
        try:
            await self._load_adapter(request)
        except CorollaError as error:
            peer.send(answer_to(control, error))
            return
        self.engine.between_iterations(lambda: self.receiver.on_offer(request, control.transfer_id, peer))

    def _handover_tokens(self, control: pb.HandoverTokens, payload: Buffer, peer: Peer) -> None:
        if peer.client_id:
            raise MalformedMessage("handover", "only servers hand sessions over")
        self.receiver.on_part(control, payload, peer)

    def _meet(self, message: pb.Meet, payload: Buffer, peer: Peer) -> None:
        if self.meetings is not None:
            self.meetings.answer(message, peer)

    def _forget(self, peer: Peer) -> None:
        """Frees or orphans the sessions that were opened on the peer's stream, which has ended.

        If it was the client's last stream, the same happens to all of the client's sessions.
        """
        is_gone = self.peers.get(peer.client_id) is None
        self.sessions.end_stream(peer.client_id, None if is_gone else peer.number)


@dataclass(eq=False, repr=False)
class AdminEndpoint:
    """Serves AdminService, through which `corolla drain` makes a block server leave, if it has a port of its own."""

    port: int
    metrics: RpcMetrics
    network: Network
    _rpc: RpcServer | None = None

    def __post_init__(self) -> None:
        self._num_sessions_left: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Begins to serve. Raises StartupError if the port is taken."""
        if self.port:
            self._rpc = self.network.rpc_server(_ADMIN_HOST, self.port, self.metrics, with_reflection=False)
            self._rpc.add(_ADMIN_SERVICE, self.network.service_handler(_ADMIN_SERVICE, self, self.metrics))
            await self._rpc.start()
            await self._rpc.ready()

    async def Drain(self, request: admin_pb2.DrainRequest, call: Call[Caller]) -> admin_pb2.DrainResponse:
        # A repeated call waits for the end of the drain that the first one began.
        ask_to_stop()
        return admin_pb2.DrainResponse(num_sessions_left=await asyncio.shield(self._num_sessions_left))

    async def stop(self, num_sessions_left: int) -> None:
        """Answers the calls of Drain that wait for the end of the drain, and stops serving."""
        if not self._num_sessions_left.done():
            self._num_sessions_left.set_result(num_sessions_left)
        if self._rpc is not None:
            await self._rpc.stop(_FAREWELL_S)


def _audit(event: str, error: CorollaError, peer: Peer) -> None:
    """Writes the identity of a caller that was denied a session into the audit log."""
    if isinstance(error, RoleDenied) and peer.workload is not None:
        audit.write(event, {"outcome": error.reason, **peer.workload.audited()})
