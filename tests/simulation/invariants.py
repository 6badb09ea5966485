"""What must hold, whatever goes wrong."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from corolla.chassis.errors import (
    CorollaError,
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
from corolla.wire.frames import decode, encode, join
from tests.simulation.callers import Answer
from tests.simulation.cluster import Client, Cluster, Server
from tests.simulation.loop import Process
from tests.simulation.scenario import Fault, hit_servers

_STATE_BYTES: Final = 4
_CONTROL: Final = (
    "router kill", "redis gone", "redis frozen", "redis flush", "redis rollback", "redis full", "client kill",
    "client freeze",
)  # fmt: skip


class Fence:
    """What comes too late lies: it arrives with other numbers than were sent. Who believes it is found out.

    A frame is too late when its receiver already knows a later epoch of the session, or has had it before.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.num_lies = 0

    def tamper(self, receiver: Process, message: bytes, is_copy: bool) -> bytes:
        service = self._service(receiver)
        if service is None:
            return message
        frames = list(decode(message))
        before = self.num_lies
        changed = [
            encode(frame.control, self._told(service, frame.control, frame.payload, is_copy)) for frame in frames
        ]
        return join(changed) if self.num_lies > before else message

    def _told(self, service: Server | Client, control: Any, payload: Any, is_copy: bool) -> Any:
        is_result = isinstance(control, pb.Result)
        if not payload or not (is_result or isinstance(control, pb.Step)):
            return payload
        data, start = bytearray(payload), 0
        for row in control.rows:
            end = start + _STATE_BYTES * (row.num_result_tokens if is_result else row.num_tokens)
            if row.epoch < self._epoch(service, row.session_id) or (is_copy and is_result):
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
            held = service.sessions._sessions.get(session_id)
            return held.request.epoch if held is not None else 0
        session = service.opener.open_sessions.get(session_id)
        return session._places.identities[0].epoch if session is not None else 0


class Invariants:
    """Collects what was broken."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.broken: list[str] = []

    def fault(self, text: str) -> None:
        """Something that must not be."""
        self.broken.append(f"{self._cluster.loop.time() - 1000:.3f} s: {text}")

    def delivered(self, answer: Answer) -> None:
        """Every hop holds what the session has behind it, when a token comes out."""
        session = answer.session
        if session is None or answer.finish_reason:
            return  # before the last token is told the turn is written down, which may take longer than a lease
        # The next step may have left already, and begun to open the session elsewhere.
        identity, opened = session._places.identities[0], session._places.opened[0]
        for hop in session.chain.hops:
            server = next((each for each in self._cluster.servers if each.server_id == hop.server_id), None)
            if server is None or server.process.is_dead:
                continue
            held = server.sessions._sessions.get(identity.session_id)
            if held is None or not opened.epoch <= held.request.epoch <= identity.epoch:
                if not self._was_hit(server.number):
                    self.fault(f"server {server.number} does not hold a session that delivers")
            elif opened != identity or self._cluster.scenario.has("repeat"):
                continue
            elif held.cache.num_tokens < session.position:
                self.fault(f"server {server.number} holds {held.cache.num_tokens} of {session.position} tokens")

    def ended(self, answer: Answer) -> None:
        """An answer ends well unless something happened to it that it cannot survive."""
        if answer.error is not None and not answer.was_cut_off and not self._is_excused(answer, answer.error):
            self.fault(f"conversation {answer.conversation}: {answer.error.reason}: {answer.error.message}")
        if answer.usage.recoveries and not answer.is_chat and not self._was_touched(answer):
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
            if client.plane.num_awaited or client.opener.open_sessions:
                self.fault(f"client {client.number} still awaits {client.plane.num_awaited} answers")

    @contextmanager
    def no_errors_logged(self) -> Iterator[None]:
        """What a service logs as an error is a fault of ours."""
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
        control = (RouterUnavailable, StoreUnavailable, SessionBusy, SessionNotFound)
        return answer.is_chat and scenario.has(*_CONTROL) and isinstance(error, control)

    def _was_touched(self, answer: Answer) -> bool:
        hit = {f"server{number}:1" for fault in self._cluster.scenario.faults for number in _touched(fault)}
        return bool(answer.addresses & hit) or self._cluster.scenario.has("client freeze")

    def _was_hit(self, number: int) -> bool:
        return any(number in _touched(fault) for fault in self._cluster.scenario.faults) or self._cluster.scenario.has(
            "client freeze"
        )


def _touched(fault: Fault) -> frozenset[int]:
    if fault.kind in ("slow", "repeat"):
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
