"""Who runs, who waits and who is refused, when more come than can run. Pure."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from corolla.chassis.errors import QueueFull, ShareExceeded

Ticket = TypeVar("Ticket", bound=Hashable)


class WaitingLine(Generic[Ticket]):
    """A line, bounded in tickets and in bytes, that tenants share fairly.

    A ticket takes a place for each of its sequences. The next places go to the tenant that has the fewest (of several,
    to the one whose last turn is longest ago), and within a tenant to who came first. So each of T tenants that wait
    comes to its share of 1/T of the places. Nobody overtakes a ticket that waits for several places; one that takes
    more than there are runs alone.

    Where the line is full, the newest tickets of the tenant that has the largest share of it make room for who comes,
    as long as that share is larger than the newcomer's own. A share is that of the tickets or of the bytes, whichever
    is larger (Ghodsi et al.: "Dominant Resource Fairness", 2011).

    Args:
        max_running: places.
        max_bytes: what all tickets hold, those that run and those that wait.
        min_shares: in how many shares the whole is divided at least, however few tenants are there at the moment.
    """

    def __init__(self, max_running: int, max_waiting: int, max_bytes: int, min_shares: int = 1) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._min_shares = min_shares
        self._running: dict[Ticket, str] = {}
        # By tenant, in order of arrival; no tenant without tickets.
        self._waiting: dict[str, list[Ticket]] = {}
        # Bytes and sequences of all tickets.
        self._sizes: dict[Ticket, int] = {}
        self._num_sequences: dict[Ticket, int] = {}
        # When the tenants that run or wait had their last turn; those that had none yet are missing.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_taken_places(self) -> int:
        """Of those who run."""
        return sum(self._num_sequences[ticket] for ticket in self._running)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def num_bytes(self) -> int:
        """What all tickets hold."""
        return sum(self._sizes.values())

    def enter(
        self, tenant: str, ticket: Ticket, num_bytes: int, num_sequences: int = 1
    ) -> list[tuple[Ticket, QueueFull]]:
        """Puts a ticket in line. Returns those that must leave for it, and the error that each gets; often none.

        Raises QueueFull, and changes nothing, where there is no room and no other tenant has a larger share.
        """
        displaced = self._displaced(tenant, num_bytes, num_sequences)
        refusals = [(theirs, self._refusal(loser, tenant)) for loser, theirs in displaced]
        for loser, theirs in displaced:
            self._remove(loser, theirs)
        self._waiting.setdefault(tenant, []).append(ticket)
        self._sizes[ticket] = num_bytes
        self._num_sequences[ticket] = num_sequences
        return refusals

    def admit(self) -> list[Ticket]:
        """Those who run from now on."""
        admitted: list[Ticket] = []
        num_places = Counter[str]()
        for ticket, tenant in self._running.items():
            num_places[tenant] += self._num_sequences[ticket]
        while self._waiting:
            tenant = min(self._waiting, key=lambda each: (num_places[each], self._last_turns.get(each, 0)))
            ticket = self._waiting[tenant][0]
            if not self._may_run(self._num_sequences[ticket]):
                break
            self._stop_waiting(tenant, ticket)
            self._running[ticket] = tenant
            self._num_turns += 1
            self._last_turns[tenant] = self._num_turns
            num_places[tenant] += self._num_sequences[ticket]
            admitted.append(ticket)
        return admitted

    def _may_run(self, num_sequences: int) -> bool:
        return not self._running or self.num_taken_places + num_sequences <= self._max_running

    def leave(self, ticket: Ticket) -> None:
        """A ticket is done with, whether it ran, waited or was displaced."""
        tenant = self._running.pop(ticket, None)
        if tenant is not None:
            self._forget(ticket)
        else:
            tenant = next((each for each, tickets in self._waiting.items() if ticket in tickets), None)
            if tenant is None:
                return
            self._remove(tenant, ticket)
        if tenant not in self._waiting and tenant not in self._running.values():
            self._last_turns.pop(tenant, None)

    def _remove(self, tenant: str, ticket: Ticket) -> None:
        self._stop_waiting(tenant, ticket)
        self._forget(ticket)

    def _stop_waiting(self, tenant: str, ticket: Ticket) -> None:
        self._waiting[tenant].remove(ticket)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _forget(self, ticket: Ticket) -> None:
        del self._sizes[ticket], self._num_sequences[ticket]

    def _displaced(self, tenant: str, num_bytes: int, num_sequences: int) -> list[tuple[str, Ticket]]:
        """Who must leave for a newcomer. Raises QueueFull."""
        num_places = self._max_waiting - self.num_waiting
        if not self._waiting and self._may_run(num_sequences):
            num_places += 1
        num_free_bytes = self._max_bytes - self.num_bytes
        displaced: list[tuple[str, Ticket]] = []
        if num_places >= 1 and num_free_bytes >= num_bytes:
            return displaced
        staying = {each: list(tickets) for each, tickets in self._waiting.items()}
        own_share = self._share(staying.get(tenant, ()), 1, num_bytes)
        while num_places < 1 or num_free_bytes < num_bytes:
            shares = {each: self._share(tickets) for each, tickets in staying.items()}
            largest = max(shares, key=shares.__getitem__, default=tenant)
            if shares.get(largest, 0.0) <= own_share:
                raise self._refusal(tenant, tenant)
            ticket = staying[largest].pop()
            displaced.append((largest, ticket))
            num_places += 1
            num_free_bytes += self._sizes[ticket]
        return displaced

    def _refusal(self, tenant: str, newcomer: str) -> QueueFull:
        """Says whether the tenant met its own share of the service, or a service that all of them together fill."""
        running = [each for each, owner in self._running.items() if owner == tenant]
        waiting = self._waiting.get(tenant, [])
        num_places = sum(self._num_sequences[each] for each in running) + len(waiting)
        num_shares = max(self._min_shares, len({newcomer, *self._waiting, *self._running.values()}))
        fair_places = -(-(self._max_running + self._max_waiting) // num_shares)
        fair_bytes = self._max_bytes / num_shares
        if num_places > fair_places or sum(self._sizes[each] for each in (*running, *waiting)) > fair_bytes:
            return ShareExceeded("the service is full, and this caller has more than its share of it")
        return QueueFull("the service has as many requests as it takes, running and waiting")

    def _share(self, tickets: Sequence[Ticket], num_more: int = 0, num_more_bytes: int = 0) -> float:
        num_bytes = sum(self._sizes[ticket] for ticket in tickets) + num_more_bytes
        return max((len(tickets) + num_more) / max(1, self._max_waiting), num_bytes / self._max_bytes)
