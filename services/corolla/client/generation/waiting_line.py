"""Decides which requests run, wait or are refused when there are more than can run. Pure."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Final, Generic, TypeVar

from corolla.chassis.errors import QueueFull, ShareExceeded

Ticket = TypeVar("Ticket", bound=Hashable)

_PARTS: Final = 16
"""One part in this many of the places is reserved for tenants that hold no more places than this part."""


class WaitingLine(Generic[Ticket]):
    """A bounded line that tenants share fairly.

    A ticket takes a place for each of its sequences. The next places go to the tenant that has the fewest (among
    equals, to the one whose last turn is longest ago), and within a tenant to its oldest ticket. So each of T waiting
    tenants gets 1/T of the places. No ticket overtakes one that waits for several places. A ticket that wants more
    places than its tenant can ever get takes as many as the tenant can get.

    A tenant may be guaranteed places. These stay free for it, so that a ticket within its guarantee runs at once,
    whatever other tenants do. If there may be several tenants, one part in sixteen of the places is reserved for
    tenants that hold no more places than this part, so no tenant gets all places.

    If the line is full, a new ticket displaces the newest ticket of the tenant with the most tickets in it, if the new
    ticket's tenant would still have fewer.

    Args:
        max_running: the number of places.
        min_shares: returns the least number of tenants among which the service is shared, even if fewer are there.
        guarantees: returns the guaranteed places by tenant, fewer than `max_running` in all.
    """

    def __init__(
        self,
        max_running: int,
        max_waiting: int,
        min_shares: Callable[[], int] = lambda: 1,
        guarantees: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._min_shares = min_shares
        self._guarantees = guarantees
        self._running: dict[Ticket, str] = {}
        # The waiting tickets by tenant, in order of arrival, without tenants that have none.
        self._waiting: dict[str, list[Ticket]] = {}
        # The places that all tickets take or wait for.
        self._places: dict[Ticket, int] = {}
        # The places of running tickets by tenant.
        self._held: Counter[str] = Counter()
        # The number of the last turn of each tenant with tickets; tenants without a turn so far are missing.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    @property
    def num_taken_places(self) -> int:
        """The number of places that running tickets take."""
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def enter(self, tenant: str, ticket: Ticket, num_sequences: int = 1) -> tuple[Ticket, QueueFull] | None:
        """Puts a ticket in the line. Returns the ticket that it displaces, with its error; often none.

        Raises QueueFull and changes nothing if there is no room and no other tenant has more tickets in the line.
        """
        num_places = min(num_sequences, self._most_places(tenant))
        refusal = None
        if (loser := self._loser(tenant, num_places)) is not None:
            displaced = self._waiting[loser][-1]
            refusal = displaced, self._refusal(loser, tenant)
            self._remove(loser, displaced)
        self._waiting.setdefault(tenant, []).append(ticket)
        self._places[ticket] = num_places
        return refusal

    def admit(self) -> list[Ticket]:
        """Moves tickets from the line to the running ones as places allow, and returns them."""
        admitted: list[Ticket] = []
        while self._waiting:
            tenant = min(self._waiting, key=self._turn)
            ticket = self._waiting[tenant][0]
            # Guarantees may have grown since the ticket came.
            self._places[ticket] = min(self._places[ticket], self._most_places(tenant))
            if not self._may_run(tenant, self._places[ticket]):
                break
            self._stop_waiting(tenant, ticket)
            self._running[ticket] = tenant
            self._num_turns += 1
            self._last_turns[tenant] = self._num_turns
            self._held[tenant] += self._places[ticket]
            admitted.append(ticket)
        return admitted

    def _turn(self, tenant: str) -> tuple[bool, int, int]:
        """The sorting key of a waiting tenant; the tenant with the lowest key is next."""
        is_guaranteed = self._is_guaranteed(tenant, self._places[self._waiting[tenant][0]])
        return not is_guaranteed, self._held[tenant], self._last_turns.get(tenant, 0)

    def _is_guaranteed(self, tenant: str, num_more: int) -> bool:
        return self._held[tenant] + num_more <= self._guarantees().get(tenant, 0)

    def _most_places(self, tenant: str) -> int:
        """The most places that a tenant can ever get."""
        guarantees = self._guarantees()
        others = sum(places for each, places in guarantees.items() if each != tenant)
        return max(1, guarantees.get(tenant, 0), self._max_running - others - self._small_part())

    def _may_run(self, tenant: str, num_more: int) -> bool:
        num_free = self._max_running - self.num_taken_places - num_more
        if self._is_guaranteed(tenant, num_more):
            return num_free >= 0
        num_kept = sum(max(0, n - self._held[each]) for each, n in self._guarantees().items() if each != tenant)
        if self._held[tenant] + num_more > self._small_part():
            num_kept += self._small_part()
        return num_free >= num_kept

    def leave(self, ticket: Ticket) -> None:
        """Removes a ticket, whether it ran, waited or was displaced."""
        tenant = self._running.pop(ticket, None)
        if tenant is not None:
            self._held[tenant] -= self._places.pop(ticket)
        else:
            tenant = next((each for each, tickets in self._waiting.items() if ticket in tickets), None)
            if tenant is None:
                return
            self._remove(tenant, ticket)
        if tenant not in self._waiting and not self._held[tenant]:
            self._last_turns.pop(tenant, None)
            del self._held[tenant]

    def _remove(self, tenant: str, ticket: Ticket) -> None:
        self._stop_waiting(tenant, ticket)
        del self._places[ticket]

    def _stop_waiting(self, tenant: str, ticket: Ticket) -> None:
        self._waiting[tenant].remove(ticket)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _loser(self, tenant: str, num_more: int) -> str | None:
        """The tenant whose newest waiting ticket a new one displaces; None: there is room. Raises QueueFull."""
        runs_at_once = self._may_run(tenant, num_more)
        if runs_at_once and self._is_guaranteed(tenant, num_more) and tenant not in self._waiting:
            return None
        if self.num_waiting < self._max_waiting or (not self._waiting and runs_at_once):
            return None
        largest = max(self._waiting, key=lambda each: len(self._waiting[each]), default=tenant)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(tenant, ())) + 1:
            raise self._refusal(tenant, tenant)
        return largest

    def _refusal(self, tenant: str, newcomer: str) -> QueueFull:
        """The error for a refused ticket: the tenant exceeds its share, or all tenants together fill the service."""
        num_places = self._held[tenant] + len(self._waiting.get(tenant, ()))
        num_shares = max(self._min_shares(), len({newcomer, *self._waiting, *self._running.values()}))
        fair_places = -(-(self._max_running + self._max_waiting) // num_shares)
        if num_places > fair_places:
            return ShareExceeded("the service is full, and this tenant already has more than its share")
        return QueueFull("the service has no room for further running or waiting requests")

    def _small_part(self) -> int:
        """The number of places that are reserved for tenants that hold no more places than that."""
        return self._max_running // _PARTS if self._min_shares() > 1 else 0
