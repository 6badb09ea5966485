"""Which requests run and which wait, for any arrivals and departures."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from corolla.chassis.errors import QueueFull, ShareExceeded
from corolla.client.generation.waiting_line import WaitingLine

TENANTS = ("ada", "bob", "cyd")
GUARANTEED = "cyd"


class Line(RuleBasedStateMachine):
    """A waiting line, with a plain record of its expected contents."""

    @initialize(max_running=st.integers(1, 5), max_waiting=st.integers(0, 6), guaranteed=st.integers(0, 4))
    def open(self, max_running: int, max_waiting: int, guaranteed: int) -> None:
        self.max_running, self.max_waiting = max_running, max_waiting
        self.guaranteed = min(guaranteed, max_running - 1)
        self.line: WaitingLine[int] = WaitingLine(
            max_running, max_waiting, guarantees=lambda: {GUARANTEED: self.guaranteed}
        )
        self.running: dict[int, str] = {}
        self.waiting: dict[int, str] = {}
        self.num_sequences: dict[int, int] = {}
        self.number = 0

    def places(self, tenants: tuple[str, ...] = TENANTS) -> int:
        return sum(self.num_sequences[each] for each, its in self.running.items() if its in tenants)

    def may_run(self, tenant: str, num_sequences: int) -> bool:
        num_kept = 0 if tenant == GUARANTEED else max(0, self.guaranteed - self.places((GUARANTEED,)))
        return self.places() + num_sequences + num_kept <= self.max_running

    def is_guaranteed(self, tenant: str, num_sequences: int) -> bool:
        return tenant == GUARANTEED and self.places((tenant,)) + num_sequences <= self.guaranteed

    def fits(self, tenant: str, num_sequences: int) -> bool:
        if self.is_guaranteed(tenant, num_sequences) and tenant not in self.waiting.values():
            return True
        return len(self.waiting) < self.max_waiting or (not self.waiting and self.may_run(tenant, num_sequences))

    def num_waiting(self, tenant: str) -> int:
        return sum(its == tenant for its in self.waiting.values())

    def admit(self) -> None:
        for ticket in self.line.admit():
            tenant = self.waiting.pop(ticket)
            least, num_sequences = self.places((tenant,)), self.num_sequences[ticket]
            if not self.is_guaranteed(tenant, num_sequences):
                assert all(least <= self.places((other,)) for other in self.waiting.values()), "passed over"
            assert self.may_run(tenant, num_sequences)
            assert all(ticket < other for other, its in self.waiting.items() if its == tenant), "overtaken"
            self.running[ticket] = tenant

    @rule(tenant=st.sampled_from(TENANTS), num_sequences=st.sampled_from([1, 1, 1, 2, 3, 6]))
    def enter(self, tenant: str, num_sequences: int) -> None:
        self.number += 1
        num_sequences = min(num_sequences, self.max_running - (self.guaranteed if tenant != GUARANTEED else 0))
        is_guaranteed = self.is_guaranteed(tenant, num_sequences) and tenant not in self.waiting.values()
        num_own = self.num_waiting(tenant) + 1
        try:
            displaced = self.line.enter(tenant, self.number, num_sequences)
        except QueueFull:
            assert not self.fits(tenant, num_sequences)
            assert num_own > self.max_waiting / len(TENANTS), "less than its part was refused"
            return
        if displaced is not None:
            assert not self.fits(tenant, num_sequences), "left for nothing"
            loser, _ = displaced
            its_tenant = self.waiting[loser]
            assert self.num_waiting(its_tenant) == max(map(self.num_waiting, TENANTS)) > num_own
            assert loser == max(each for each, its in self.waiting.items() if its == its_tenant)
            del self.waiting[loser]
        assert self.fits(tenant, num_sequences)
        self.waiting[self.number] = tenant
        self.num_sequences[self.number] = num_sequences
        self.admit()
        assert not is_guaranteed or self.number in self.running

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
        assert self.line.num_waiting == len(self.waiting)
        assert self.line.num_taken_places == self.places()
        assert self.places() <= self.max_running
        others = tuple({*TENANTS} - {GUARANTEED})
        assert self.places(others) <= self.max_running - self.guaranteed
        assert len(self.waiting) <= self.max_waiting
        if self.waiting:
            least = min(self.places((tenant,)) for tenant in self.waiting.values())
            first_of_each = {tenant: ticket for ticket, tenant in sorted(self.waiting.items(), reverse=True)}
            in_turn = [ticket for tenant, ticket in first_of_each.items() if self.places((tenant,)) == least]
            is_stuck = any(not self.may_run(self.waiting[ticket], self.num_sequences[ticket]) for ticket in in_turn)
            assert is_stuck, "a place stays empty while somebody waits for it"


TestLine = Line.TestCase


def test_several_sequences_take_several_places_and_are_not_overtaken() -> None:
    line: WaitingLine[str] = WaitingLine(4, 10)
    for ticket, num_sequences in (("a0", 3), ("b0", 2), ("c0", 1), ("d0", 16)):
        line.enter(ticket[0], ticket, num_sequences)
    assert line.admit() == ["a0"]
    line.leave("a0")
    assert line.admit() == ["b0", "c0"]
    line.leave("b0")
    assert line.admit() == []
    line.leave("c0")
    # More than there are: alone.
    assert line.admit() == ["d0"]


def test_who_is_guaranteed_a_place_goes_before_who_runs_less() -> None:
    guarantees: dict[str, int] = {}
    line: WaitingLine[str] = WaitingLine(4, 10, lambda: 1, lambda: guarantees)
    for ticket in ("q0", "q1", "n0", "n1", "o0", "q2"):
        line.enter(ticket[0], ticket)
        line.admit()
    guarantees["q"] = 3
    line.leave("n0")
    assert line.admit() == ["q2"]
    line.leave("n1")
    assert line.admit() == ["o0"]


def test_no_tenant_has_all_places_where_there_are_several() -> None:
    min_shares = 1
    line: WaitingLine[str] = WaitingLine(64, 100, lambda: min_shares)
    for number in range(70):
        line.enter("noisy", f"n{number}")
        line.admit()
    assert line.num_taken_places == 64
    line.enter("quiet", "q0", 4)
    assert line.admit() == []
    # Another tenant gets a key.
    min_shares = 2
    for number in range(4):
        line.leave(f"n{number}")
    assert (line.admit(), line.num_taken_places) == (["q0"], 64)


def refused(line: WaitingLine[str], tenant: str) -> type[QueueFull]:
    with pytest.raises(QueueFull) as caught:
        line.enter(tenant, "one more")
    return type(caught.value)


def filled(tenants: str, min_shares: int) -> WaitingLine[str]:
    """Four run and four wait, one letter each for whose they are."""
    line: WaitingLine[str] = WaitingLine(4, 4, lambda: min_shares)
    for number, tenant in enumerate(tenants):
        line.enter(tenant, f"{tenant}{number}")
        line.admit()
    return line


@pytest.mark.parametrize(
    "tenants, min_shares, whose_fault",
    [
        ("aaaaaaaa", 1, {"a": QueueFull}),
        # Others may come.
        ("aaaaaaaa", 2, {"a": ShareExceeded}),
        ("abababab", 2, {"a": QueueFull, "b": QueueFull}),
        ("abababab", 1, {"a": QueueFull, "b": QueueFull}),
        ("aaaaaabb", 1, {"a": ShareExceeded}),
        # Eight binding for three: one has two only.
        ("aabbaacc", 1, {"a": ShareExceeded}),
        ("aabbccab", 1, {"a": QueueFull, "b": QueueFull}),
    ],
)
def test_a_tenant_beyond_an_equal_share_meets_its_own_limit(
    tenants: str, min_shares: int, whose_fault: dict[str, type[QueueFull]]
) -> None:
    for tenant, kind in whose_fault.items():
        assert refused(filled(tenants, min_shares), tenant) is kind


def test_a_displaced_request_gets_the_same_error_as_a_refused_one() -> None:
    displaced = filled("aaaaaaaa", 2).enter("b", "b0")
    assert displaced is not None
    assert (displaced[0], type(displaced[1])) == ("a7", ShareExceeded)
