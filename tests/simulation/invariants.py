"""Invariants that hold under every fault."""

import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

from google.protobuf.message import Message

from corolla.block_server.hop_session import ForbiddenTransition, HopSession, SessionEvent, SessionState
from corolla.chain import lateness
from corolla.chain.streams import DataPlane
from corolla.chassis.errors import (
    CorollaError,
    HopLate,
    HopUnavailable,
    InternalError,
    NoChain,
    NonFiniteOutput,
    OutOfPages,
    QueueFull,
    RouterUnavailable,
    SessionBusy,
    SessionNotFound,
    StoreUnavailable,
)
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.frames import encode
from tests.frame_bytes import decode, join
from tests.simulation.callers import Answer, Completion
from tests.simulation.cluster import Client, Cluster, Server
from tests.simulation.loop import Process
from tests.simulation.scenario import Fault, hit_servers

_STATE_BYTES: Final = 4
_CONTROL: Final = (
    "router kill", "redis gone", "redis frozen", "redis flush", "redis rollback", "redis full", "client kill",
    "client freeze",
)  # fmt: skip


_NEWER_FIELDS: Final[dict[type[Message], tuple[str, ...]]] = {
    pb.Welcome: ("takes_standbys", "cuts_are_equal"),
    pb.Open: ("standby_transfer_id", "write_start", "only_cached"),
    pb.Opened: ("common_end", "step_id", "load"),
    pb.Fault: ("load",),
    pb.Credit: ("capability",),
    pb.Handover: ("text", "page_tokens", "write_start"),
    pb.HandoverTokens: ("has_states", "step_id"),
}
"""The fields that came since the protocol has its version. A frame that came since must not be sent to older peers."""


_REPEATED: Final = pb.Step | pb.Result | pb.HandoverTokens


class Fence:
    """Alters late and repeated messages: they arrive with other numbers than were sent, so using one gives wrong ones.

    A frame is too late when its receiver already knows a later epoch of the session, or has had it before.
    Messages from and to a process of the release before arrive without what that release does not know.

    Args:
        fault: is told of frames that the release before does not know.
    """

    def __init__(self, cluster: Cluster, fault: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._fault = fault
        self._num_to_damage: Counter[str] = Counter()
        self.num_lies = 0

    def damage(self, server: Server) -> None:
        """The next part of a handover arrives changed there."""
        self._num_to_damage[server.process.name] += 1

    def tamper(self, sender: Process, receiver: Process, message: bytes, is_copy: bool) -> bytes:
        if self._cluster.scenario.of_release_before in (sender.name, receiver.name):
            message = self._aged(message)
        service = self._service(receiver)
        if service is None:
            return message
        # A real stream never repeats a frame. Steps and results come again all the same, to see that they count for
        # nothing; control frames do not, since a session that is opened or closed twice is. Parts of sessions come
        # again with other numbers and another transfer's id, as from a server that lies.
        frames = [each for each in decode(message) if not is_copy or isinstance(each.control, _REPEATED)]
        before = self.num_lies, self._num_to_damage.total()
        changed = [
            encode(frame.control, self._altered(service, frame.control, frame.payload, is_copy)) for frame in frames
        ]
        return join(changed) if is_copy or (self.num_lies, self._num_to_damage.total()) != before else message

    def _aged(self, message: bytes) -> bytes:
        """The message without what the release before does not know."""
        frames = list(decode(message))
        for frame in frames:
            if isinstance(frame.control, pb.Standby):
                self._fault("a frame was sent to a process that does not know it")
            for name in _NEWER_FIELDS.get(type(frame.control), ()):
                frame.control.ClearField(name)
        return join(encode(frame.control, frame.payload) for frame in frames)

    def _altered(self, service: Server | Client, control: Any, payload: Any, is_copy: bool) -> Any:
        is_result, name = isinstance(control, pb.Result), service.process.name
        if isinstance(control, pb.HandoverTokens) and is_copy:
            self.num_lies += 1
            control.transfer_id = bytes(byte ^ 1 for byte in control.transfer_id)
            payload = bytes(len(payload))
            control.checksum = zlib.crc32(payload)
            return payload
        if isinstance(control, pb.HandoverTokens) and payload and self._num_to_damage[name]:
            self._num_to_damage[name] -= 1
            return bytes([payload[0] ^ 1, *payload[1:]])
        if isinstance(control, pb.HandoverTokens) and control.epoch < self._epoch(service, control.session_id):
            self.num_lies += 1
            payload = bytes(len(payload))
            control.checksum = zlib.crc32(payload)
            return payload
        if not payload or not (is_result or isinstance(control, pb.Step)):
            return payload
        data, start = bytearray(payload), 0
        for row in control.rows:
            end = start + _STATE_BYTES * (row.num_result_tokens if is_result else row.num_tokens)
            if is_copy or row.epoch < self._epoch(service, row.session_id):
                data[start:end] = bytes(end - start)
                self.num_lies += 1
            start = end
        return data

    def _service(self, process: Process) -> Server | Client | None:
        services = (*self._cluster.servers, *self._cluster.clients)
        return next((each for each in services if each.process is process), None)

    @staticmethod
    def _epoch(service: Server | Client, session_id: bytes) -> int:
        if isinstance(service, Server):
            held = service.sessions.get(session_id)
            return held.request.epoch if held is not None else 0
        session = service.sessions.open_sessions.get(session_id)
        return session.identity.epoch if session is not None else 0


class Invariants:
    """Collects violations.

    Attributes:
        transitions: how often each event happened to a session in each state, on all servers.
        num_late: how often a session left a silent hop whose token was late.
        happened: is told of each event of a session on a hop.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.broken: list[str] = []
        self.happened: Callable[[HopSession[Any], SessionEvent], None] = lambda session, event: None
        self.transitions: Counter[tuple[SessionState, SessionEvent]] = Counter()
        self.num_late = 0

    def fault(self, text: str) -> None:
        """Something that must not be."""
        self.broken.append(f"{self._cluster.loop.time() - 1000:.3f} s: {text}")

    def delivered(self, completion: Completion) -> None:
        """Every hop holds all tokens of the session when its next token comes out."""
        session = completion.session
        if session is None or completion.finish_reason:
            return  # the turn is written down before the last token is delivered, which may take longer than a lease
        # The next step may have left already, and begun to open the session elsewhere.
        identity, opened = session.identity, session.open_identity
        for hop in session.chain.hops:
            server = next((each for each in self._cluster.servers if each.server_id == hop.server_id), None)
            if server is None or server.process.is_dead:
                continue
            held = server.sessions.get(identity.session_id)
            if held is None or not opened.epoch <= held.request.epoch <= identity.epoch:
                if not self._was_hit(server.number):
                    self.fault(f"server {server.number} does not hold a session that delivers")
            elif opened != identity:
                continue
            elif held.cache.num_tokens < session.position:
                self.fault(f"server {server.number} holds {held.cache.num_tokens} of {session.position} tokens")

    def ended(self, answer: Answer) -> None:
        """An answer ends well unless something happened to it that it cannot survive."""
        if answer.error is not None and not answer.was_cut_off and not self._is_excused(answer, answer.error):
            self.fault(f"conversation {answer.conversation}: {answer.error.reason}: {answer.error.message}")
        if answer.usage.recoveries and not answer.is_chat and not self._was_one_touched(answer.addresses):
            self.fault(f"conversation {answer.conversation} was recovered, though nothing had happened to its hops")

    def nothing_left(self, *, is_calm: bool) -> None:
        """No session and no page stays behind.

        Args:
            is_calm: nothing went wrong, so that it need not take a lease; conversations stay till theirs ends.
        """
        for server in self._cluster.servers:
            if server.process.is_dead:
                continue
            pool = server.sessions.pool
            left = [held for held in server.sessions if not (is_calm and held.is_idle)]
            if left:
                self.fault(f"server {server.number} still holds {len(left)} sessions")
            if not is_calm and (pool.num_used or pool.num_reserved or server.outputs.nbytes):
                self.fault(f"server {server.number}: {pool.num_used} pages used, {pool.num_reserved} reserved, "
                           f"{server.outputs.nbytes} bytes of outputs")  # fmt: skip
            if len(server.scheduler):
                self.fault(f"server {server.number} has {len(server.scheduler)} steps in line")
        for client in self._cluster.clients:
            if client.process.is_dead:
                continue
            if client.plane.num_pending or client.sessions.open_sessions:
                self.fault(f"client {client.number} still awaits {client.plane.num_pending} answers")

    @contextmanager
    def sessions_follow_their_table(self) -> Iterator[None]:
        """Sessions on hops make only the transitions of their table, even if the code catches the exception."""
        happen = HopSession.apply

        def note(session: HopSession[Any], event: SessionEvent) -> None:
            before = session.state
            try:
                happen(session, event)
            except ForbiddenTransition as mistake:
                self.fault(str(mistake))
                raise
            self.transitions[before, event] += 1
            self.happened(session, event)

        with patch.object(HopSession, "apply", note):
            yield

    @contextmanager
    def only_silent_hops_are_late(self) -> Iterator[None]:
        """A session whose token is late leaves only hops that something happened to. Answers here are short."""
        late_hop = DataPlane.late_hop

        def note(plane: DataPlane, addresses: Iterable[str]) -> HopLate | None:
            failure = late_hop(plane, addresses)
            if failure is not None:
                self.num_late += 1
                if not self._was_one_touched({failure.address}):
                    self.fault(f"{failure.address} lost a session by its silence, and nothing happened to it")
            return failure

        with patch.object(DataPlane, "late_hop", note), patch.object(lateness, "FEWEST_WAITS", 2):
            yield

    @contextmanager
    def no_errors_logged(self) -> Iterator[None]:
        """An error in a service's log is a fault of ours."""
        handler = _ErrorLog(self.fault)
        logger = logging.getLogger("corolla")
        before = logger.level, logger.propagate
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.level, logger.propagate = before

    def _is_excused(self, answer: Answer, error: CorollaError) -> bool:
        scenario = self._cluster.scenario
        if not scenario.keeps_coverage and not isinstance(error, InternalError):
            return True
        if scenario.is_tight and isinstance(error, OutOfPages | QueueFull | HopUnavailable | NoChain):
            return True
        # A request is tried once more where numbers are bad; whether it meets another such server, chance decides.
        num_bad = sum(fault.kind == "bad numbers" for fault in scenario.faults)
        if num_bad > 1 and isinstance(error, NonFiniteOutput):
            return True
        # A router has a placement for who comes while Redis is away if it has pushed one to somebody before.
        has_new_clients = scenario.has("client kill") and (scenario.num_routers > 1 or scenario.has("router kill"))
        if has_new_clients and isinstance(error, StoreUnavailable):
            return True
        control = (RouterUnavailable, StoreUnavailable, SessionBusy, SessionNotFound)
        return answer.is_chat and scenario.has(*_CONTROL) and isinstance(error, control)

    def _was_one_touched(self, addresses: Set[str]) -> bool:
        hit = {f"server{number}:1" for fault in self._cluster.faults for number in touched(fault)}
        return bool(addresses & hit) or self._cluster.scenario.has("client freeze")

    def _was_hit(self, number: int) -> bool:
        was_touched = any(number in touched(fault) for fault in self._cluster.faults)
        return was_touched or self._cluster.scenario.has("client freeze")


def touched(fault: Fault) -> frozenset[int]:
    """The numbers of the servers to which a fault does something."""
    if fault.kind == "slow":
        return frozenset([fault.target])
    if fault.kind == "reset":
        return frozenset((fault.target, fault.other))
    return hit_servers(fault)


class _ErrorLog(logging.Handler):
    def __init__(self, fault: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._fault = fault

    def emit(self, record: logging.LogRecord) -> None:
        where = getattr(record, "where", "")
        self._fault(f"logged: {record.getMessage()} {where}")
