"""Who runs and who waits, whatever comes and goes."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from corolla.chassis.errors import QueueFull
from corolla.client.generation.waiting_line import WaitingLine

TENANTS = ("ada", "bob", "cyd")


class Line(RuleBasedStateMachine):
    """A line beside a plain record of what it should hold."""

    @initialize(max_running=st.integers(1, 4), max_waiting=st.integers(0, 6))
    def open(self, max_running: int, max_waiting: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.line: WaitingLine[int] = WaitingLine(max_running, max_waiting)
        self.running: dict[int, str] = {}
        self.waiting: dict[int, str] = {}
        self.number = 0

    def admit(self) -> None:
        for ticket in self.line.admit():
            tenant = self.waiting.pop(ticket)
            counts = Counter(self.running.values())
            assert all(counts[tenant] <= counts[other] for other in self.waiting.values()), "passed over"
            assert all(ticket < other for other, its in self.waiting.items() if its == tenant), "overtaken"
            self.running[ticket] = tenant

    @rule(tenant=st.sampled_from(TENANTS))
    def enter(self, tenant: str) -> None:
        self.number += 1
        waiting = Counter(self.waiting.values())
        try:
            displaced = self.line.enter(tenant, self.number)
        except QueueFull:
            assert len(self.running) == self.max_running
            assert len(self.waiting) == self.max_waiting
            assert all(number <= waiting[tenant] + 1 for number in waiting.values())
            return
        self.waiting[self.number] = tenant
        if displaced is not None:
            loser = self.waiting.pop(displaced)
            assert len(self.waiting) == self.max_waiting
            assert waiting[loser] == max(waiting.values()) > waiting[tenant] + 1
            assert displaced > max((each for each, its in self.waiting.items() if its == loser), default=0)
        self.admit()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        held = [*self.running, *self.waiting]
        if held:
            ticket = data.draw(st.sampled_from(held))
            self.line.leave(ticket)
            self.running.pop(ticket, None)
            self.waiting.pop(ticket, None)
            self.admit()

    @rule()
    def a_stranger_leaves(self) -> None:
        self.line.leave(-1)

    @invariant()
    def nothing_is_lost_and_nothing_too_much(self) -> None:
        assert (self.line.num_running, self.line.num_waiting) == (len(self.running), len(self.waiting))
        assert len(self.running) <= self.max_running
        assert len(self.waiting) <= self.max_waiting
        assert not self.waiting or len(self.running) == self.max_running, "a place stays empty while somebody waits"


TestLine = Line.TestCase


def test_tenants_take_turns() -> None:
    line: WaitingLine[str] = WaitingLine(1, 10)
    for ticket in ("a0", "a1", "a2", "b0", "b1", "c0"):
        line.enter(ticket[0], ticket)
    order = []
    while ticket_now := line.admit():
        order += ticket_now
        line.leave(ticket_now[0])
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2"]
