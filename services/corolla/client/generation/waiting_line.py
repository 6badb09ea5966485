"""Who runs, who waits and who is refused, when more come than can run. Pure."""

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from corolla.chassis.errors import QueueFull

Ticket = TypeVar("Ticket", bound=Hashable)


class WaitingLine(Generic[Ticket]):
    """A bounded line that tenants share fairly.

    The next place goes to the tenant that has the fewest running (of several, to the one whose last turn is longest
    ago), and within a tenant to who came first. So nobody who has less is passed over, and among T tenants that wait
    each comes to its share of 1/T of the places. Where the line is full, who comes takes the place of the newest of the
    tenant that has most waiting, if that is more than its own.

    Args:
        max_running: tickets that run at a time.
        max_waiting: tickets that wait at a time.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: dict[Ticket, str] = {}
        # By tenant, in order of arrival; no tenant without tickets.
        self._waiting: dict[str, list[Ticket]] = {}
        # When the tenants that run or wait had their last turn; those that had none yet are missing.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def check(self, tenant: str) -> None:
        """Raises QueueFull where `enter` would."""
        if self._has_room():
            return
        if max(map(len, self._waiting.values()), default=0) <= len(self._waiting.get(tenant, ())) + 1:
            raise QueueFull("the service has as many requests as it takes, running and waiting")

    def enter(self, tenant: str, ticket: Ticket) -> Ticket | None:
        """Puts a ticket in line. Returns the one that must leave for it, if any.

        Raises:
            QueueFull: there is no room, and no other tenant has two more waiting than this one.
        """
        self.check(tenant)
        displaced = None
        if not self._has_room():
            longest = max(self._waiting, key=lambda each: len(self._waiting[each]))
            displaced = self._waiting[longest][-1]
            self._remove(longest, displaced)
        self._waiting.setdefault(tenant, []).append(ticket)
        return displaced

    def admit(self) -> list[Ticket]:
        """Those who run from now on."""
        admitted: list[Ticket] = []
        num_running = Counter(self._running.values())
        while self._waiting and len(self._running) < self._max_running:
            tenant = min(self._waiting, key=lambda each: (num_running[each], self._last_turns.get(each, 0)))
            ticket = self._waiting[tenant][0]
            self._remove(tenant, ticket)
            self._running[ticket] = tenant
            self._num_turns += 1
            self._last_turns[tenant] = self._num_turns
            num_running[tenant] += 1
            admitted.append(ticket)
        return admitted

    def leave(self, ticket: Ticket) -> None:
        """A ticket is done with, whether it ran, waited or was displaced."""
        tenant = self._running.pop(ticket, None)
        if tenant is None:
            tenant = next((each for each, tickets in self._waiting.items() if ticket in tickets), None)
            if tenant is None:
                return
            self._remove(tenant, ticket)
        if tenant not in self._waiting and tenant not in self._running.values():
            self._last_turns.pop(tenant, None)

    def _remove(self, tenant: str, ticket: Ticket) -> None:
        self._waiting[tenant].remove(ticket)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _has_room(self) -> bool:
        num_free = self._max_running - len(self._running)
        return self.num_waiting < self._max_waiting + num_free
