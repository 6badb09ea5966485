"""The first hop of a ring: it forms microbatches, whose rows stay together down the chain.

In a ring, the last hop sends the tokens that it chooses to the first hop, where they come round as the rows of the next
steps. If each hop gathered rows for itself, sessions would scatter over the hops and batches would stay small. So the
first hop forms each microbatch once, from sessions of any client with the same route. As many microbatches may be under
way as the chain has devices, so that no device idles. Hops that share a GPU count once, since two microbatches would
read its weights twice.

Tenants share the time of a round. While `n` tenants have rows or prompts here, a round may take at most `n` times as
long as a round with only the rows of the tenant that has the fewest. The other tenants get equal numbers of rows within
that time. So next to one other tenant, a token takes at most twice as long as alone. While more rows take no more time,
as on a GPU, there is no such limit.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from corolla.block_server.hop_session import RingPlace, SessionState
from corolla.block_server.peers import StepFaults
from corolla.block_server.ring.microbatch_rules import MicrobatchRules
from corolla.block_server.ring.round_times import RoundTimes
from corolla.block_server.sessions import SessionTable
from corolla.cache.store import SessionCache
from corolla.chassis.errors import HopSessionLost
from corolla.chassis.fair_queueing import FairQueueing
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span

_LONGEST_ROUND_S: Final = 5.0
"""The longest time for which a microbatch counts as under way. A longer round does no harm: another microbatch may
begin, and the load becomes slightly less even."""
_PRESENCE_S: Final = 0.1
"""A tenant counts as present for this long after its last row or prompt, since another one probably follows."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """A microbatch under way. `num_rows_under_way` counts the route's rows that were under way once it had left."""

    rows: Sequence[pb.StepRow]
    sent_s: float
    num_rows_under_way: int


@dataclass(slots=True)
class _Route:
    """The rows and microbatches of all sessions with the same route.

    Attributes:
        waiting: rows that have come round, by session id, in the order of arrival.
        under_way: the microbatches under way, by number.
    """

    blocks: Span
    ring: RingPlace
    rules: MicrobatchRules
    waiting: dict[bytes, pb.StepRow] = field(default_factory=dict)
    under_way: dict[int, _Microbatch] = field(default_factory=dict)

    @property
    def num_rows_under_way(self) -> int:
        return sum(len(microbatch.rows) for microbatch in self.under_way.values())

    def tenants_under_way(self, tenant_of: Callable[[bytes], str]) -> Counter[str]:
        """The number of rows under way for each tenant."""
        return Counter(tenant_of(row.session_id) for each in self.under_way.values() for row in each.rows)

    def num_leaving(self, names: Sequence[bytes]) -> int:
        """Returns how many rows leave now if only the rows of these sessions wait, in this order."""
        sizes = [self.waiting[name].num_tokens for name in names]
        return self.rules.num_leaving(sizes, len(self.under_way), self.num_rows_under_way)


_RouteKey = tuple[int, int, bytes]


@dataclass(eq=False, repr=False)
class FirstHop:
    """Forms the microbatches that begin here.

    Args:
        submit: queues a step.
        faults: tells the clients of rows why they fail.
        max_microbatches: how many microbatches of a route may be under way; 0 allows one for each device.
        num_devices: returns how many devices the servers at some addresses compute with.
    """

    sessions: SessionTable[SessionCache]
    submit: Callable[[pb.Step], None]
    faults: StepFaults
    clock: Callable[[], float] = time.monotonic
    _: KW_ONLY
    max_microbatches: int = 0
    num_devices: Callable[[Sequence[str]], int] = len
    # A route is kept while a row of it waits or is under way.
    _routes: dict[_RouteKey, _Route] = field(init=False, default_factory=dict)
    _newest_number: int = field(init=False, default=0)
    _round_times: RoundTimes = field(init=False, default_factory=RoundTimes)
    _seen_s: dict[str, float] = field(init=False, default_factory=dict)

    @property
    def num_waiting(self) -> int:
        """How many rows have come round and wait for their microbatch."""
        return sum(len(route.waiting) for route in self._routes.values())

    def on_tenants(self, tenants: Iterable[str]) -> None:
        """Notes that tenants sent steps that belong to no ring; most of these are prompts."""
        now_s = self.clock()
        for tenant in tenants:
            self._seen_s[tenant] = now_s

    def on_next(self, message: pb.Next) -> None:
        """Takes the rows of a microbatch that came round, or a row of a session that starts or resumes its ring."""
        now_s = self.clock()
        touched = []
        for key, route in self._routes.items():
            if (microbatch := route.under_way.pop(message.microbatch, None)) is not None:
                self._round_times.observe(microbatch.num_rows_under_way, now_s - microbatch.sent_s)
                touched.append(key)
        for row in message.rows:
            session = self.sessions.get(row.session_id)
            is_open = session is not None and session.is_open_as(row.epoch, row.client_id)
            if session is None or session.ring is None or not is_open:
                if not self.sessions.has_ended(row.session_id, row.epoch, row.client_id):
                    self.faults.send(message, HopSessionLost("the session is not held here"), [row])
                continue
            self._seen_s[session.request.tenant] = now_s
            blocks = session.request.blocks
            # Python compares numbers and bytes faster than spans, and each row looks its route up.
            key = (blocks.start, blocks.end, session.ring.route_key)
            # A row that arrives a second time is ignored.
            if row.position > session.newest_ring_position:
                self._route(key, blocks, session.ring).waiting.setdefault(row.session_id, row)
                touched.append(key)
        for key in dict.fromkeys(touched):
            self._send_ready(key)

    def settle(self) -> None:
        """Forgets rows and microbatches of sessions that have ended or were opened again.

        It also stops counting microbatches that have been under way for very long: the message that reports that they
        came round may be lost. Then it sends the rows that need no longer wait.
        """
        oldest_s = self.clock() - _LONGEST_ROUND_S
        for key, route in list(self._routes.items()):
            lost = [
                number
                for number, microbatch in route.under_way.items()
                if microbatch.sent_s < oldest_s or not any(map(self._is_current, microbatch.rows))
            ]
            for number in lost:
                del route.under_way[number]
            route.waiting = {name: row for name, row in route.waiting.items() if self._is_current(row)}
            self._send_ready(key)

    def _route(self, key: _RouteKey, blocks: Span, ring: RingPlace) -> _Route:
        route = self._routes.get(key)
        if route is None:
            num_devices = self.num_devices([ring.first_address, *(hop.address for hop in ring.route)])
            max_under_way = min(self.max_microbatches or num_devices, num_devices)
            rules = MicrobatchRules(max_under_way=max_under_way, max_tokens=ring.max_step_tokens)
            route = self._routes[key] = _Route(blocks, ring, rules)
        return route

    def _is_current(self, row: pb.StepRow) -> bool:
        """A row is its session's newest step."""
        session = self.sessions.get(row.session_id)
        if session is None or session.state not in (SessionState.RUNNING, SessionState.LEAVING):
            return False
        return session.request.epoch == row.epoch and session.newest_ring_position <= row.position

    def _send_ready(self, key: _RouteKey) -> None:
        route = self._routes.get(key)
        if route is None:
            return
        while leaving := self._leaving(route):
            rows = [route.waiting.pop(name) for name in leaving]
            self._newest_number += 1
            route.under_way[self._newest_number] = _Microbatch(rows, self.clock(), route.num_rows_under_way + len(rows))
            self.submit(self._step(route, rows))
        if not route.waiting and not route.under_way:
            del self._routes[key]

    def _leaving(self, route: _Route) -> Sequence[bytes]:
        """The sessions whose rows leave now as one microbatch."""
        names = self._shared(route) if route.waiting and self._has_company(route) else list(route.waiting)
        return names[: route.num_leaving(names)]

    def _has_company(self, route: _Route) -> bool:
        """Several tenants are present. Forgets tenants not seen for a while that have no row under way."""
        if len(self._seen_s) > 1:
            oldest_s = self.clock() - _PRESENCE_S
            for tenant in route.tenants_under_way(self._tenant):
                self._seen_s[tenant] = max(self._seen_s.get(tenant, oldest_s), oldest_s)
            self._seen_s = {tenant: seen_s for tenant, seen_s in self._seen_s.items() if seen_s >= oldest_s}
        return len(self._seen_s) > 1

    def _shared(self, route: _Route) -> list[bytes]:
        """The waiting sessions whose rows may leave within the tenants' limits, in the order of fair queueing."""
        tenants = {name: self._tenant(name) for name in route.waiting}
        queueing = FairQueueing()
        stamps = {name: queueing.stamp(tenant, 1) for name, tenant in tenants.items()}
        num_rows = Counter(tenants.values()) + route.tenants_under_way(self._tenant)
        # If only one tenant has rows, another one has a prompt here and will soon have one row.
        fewest = min(num_rows.values()) if len(num_rows) > 1 else 1
        num_others = max(len(num_rows), 2) - 1
        num_rows_of_each = (self._round_times.num_rows_within(num_others + 1, fewest) - fewest) / num_others
        most = max(fewest, num_rows_of_each) / route.rules.max_under_way
        return sorted((name for name in stamps if stamps[name] < most), key=stamps.__getitem__)

    def _tenant(self, session_id: bytes) -> str:
        session = self.sessions.get(session_id)
        return "" if session is None else session.request.tenant

    def _step(self, route: _Route, rows: Sequence[pb.StepRow]) -> pb.Step:
        ring = pb.Ring(first_address=route.ring.first_address, microbatch=self._newest_number)
        return pb.Step(rows=rows, blocks=route.blocks.to_message(), route=route.ring.route, samples=True, ring=ring)
