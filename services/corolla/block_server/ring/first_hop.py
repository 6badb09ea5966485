"""The first hop of a ring: rows that come round become microbatches that stay together down the chain.

If each hop gathered for itself, sessions would scatter over the hops and batches stay small. So the first hop forms
each microbatch once, of all sessions with the same route, whichever client they are of. As many as the chain has hops
may be under way, so that no hop idles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from corolla.block_server.hop_session import HopSession, RingPlace, SessionState
from corolla.block_server.kv.store import SessionCache
from corolla.block_server.ring.microbatch_rules import MicrobatchRules
from corolla.block_server.sessions import SessionTable
from corolla.chassis.errors import CorollaError, HopSessionLost
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.span import Span


@dataclass(slots=True)
class _Route:
    """Sessions that go round the same way: rows that wait here, and microbatches under way by their numbers."""

    blocks: Span
    ring: RingPlace
    rules: MicrobatchRules
    waiting: list[pb.StepRow] = field(default_factory=list)
    under_way: dict[int, Sequence[pb.StepRow]] = field(default_factory=dict)

    @property
    def num_rows_under_way(self) -> int:
        return sum(map(len, self.under_way.values()))


class FirstHop:
    """Forms the microbatches that begin here.

    Args:
        submit: queues a step, or raises.
        fault: tells the clients of rows why they fail.
    """

    def __init__(
        self,
        sessions: SessionTable[SessionCache],
        submit: Callable[[pb.Step], None],
        fault: Callable[[pb.Step | pb.Next, CorollaError, Sequence[pb.StepRow]], None],
    ) -> None:
        self._sessions = sessions
        self._submit = submit
        self._fault = fault
        # A route is kept while a row of it waits or is under way.
        self._routes: dict[tuple[Span, bytes], _Route] = {}
        self._newest_number = 0

    @property
    def num_waiting(self) -> int:
        """Rows that have come round and wait for their microbatch."""
        return sum(len(route.waiting) for route in self._routes.values())

    def on_next(self, message: pb.Next) -> None:
        """A microbatch came round, or a session joins."""
        touched = [key for key, route in self._routes.items() if route.under_way.pop(message.microbatch, None)]
        for row in message.rows:
            session = self._sessions.get(row.session_id)
            if session is None or session.ring is None or session.request.epoch != row.epoch:
                if not self._sessions.has_ended(row.session_id, row.epoch):
                    self._fault(message, HopSessionLost("the session is not held here"), [row])
                continue
            if row.position <= session.newest_ring_position:
                continue  # it came before
            touched.append(self._add(row, session, session.ring))
        for key in dict.fromkeys(touched):
            self._send_ready(key)

    def settle(self) -> None:
        """Sessions may have ended, or been opened anew: what they had under way or waiting is forgotten."""
        for key, route in list(self._routes.items()):
            lost = [number for number, rows in route.under_way.items() if not any(map(self._is_current, rows))]
            for number in lost:
                del route.under_way[number]
            route.waiting = [row for row in route.waiting if self._is_current(row)]
            self._send_ready(key)

    def _add(self, row: pb.StepRow, session: HopSession[SessionCache], ring: RingPlace) -> tuple[Span, bytes]:
        key = (session.request.blocks, ring.route_key)
        route = self._routes.get(key)
        if route is None:
            rules = MicrobatchRules(max_under_way=len(ring.route) + 1, max_tokens=ring.max_step_tokens)
            route = self._routes[key] = _Route(session.request.blocks, ring, rules)
        route.waiting.append(row)
        return key

    def _is_current(self, row: pb.StepRow) -> bool:
        """Whether a row is its session's newest step."""
        session = self._sessions.get(row.session_id)
        if session is None or session.state not in (SessionState.RUNNING, SessionState.LEAVING):
            return False
        return session.request.epoch == row.epoch and session.newest_ring_position <= row.position

    def _send_ready(self, key: tuple[Span, bytes]) -> None:
        route = self._routes.get(key)
        if route is None:
            return
        while num_leaving := route.rules.num_leaving(
            [row.num_tokens for row in route.waiting], len(route.under_way), route.num_rows_under_way
        ):
            rows, route.waiting = route.waiting[:num_leaving], route.waiting[num_leaving:]
            self._newest_number += 1
            step = self._step(route, rows)
            try:
                self._submit(step)
            except CorollaError as error:
                self._fault(step, error, rows)
            else:
                route.under_way[self._newest_number] = rows
        if not route.waiting and not route.under_way:
            del self._routes[key]

    def _step(self, route: _Route, rows: Sequence[pb.StepRow]) -> pb.Step:
        blocks = common_pb2.BlockSpan(start=route.blocks.start, end=route.blocks.end)
        ring = pb.Ring(first_address=route.ring.first_address, microbatch=self._newest_number)
        return pb.Step(rows=rows, blocks=blocks, route=route.ring.route, samples=True, ring=ring)
