"""Groups the servers of a placement by what replicas have in common, so that a plan looks at few of them. Pure.

Of servers with the same weights, span, zone and numerics, a cheapest chain needs only those that no other one beats,
both for each block and at its entry: the Pareto front. Each plan finds the fronts anew, since sessions exclude other
servers and need different room. But the servers of a kind are sorted once for each placement, and the search ends where
all later ones are beaten. So a plan takes about as long with a thousand servers as with ten.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from corolla.planning.bookings import Booked
from corolla.planning.planner import Candidate
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span

_NOTHING = Booked()


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """The session for which servers are chosen.

    Attributes:
        num_tokens: The number of tokens for which a server needs free pages; 0: it needs none.
        excluded: The ids of servers that must not be in the chain.
        booked: Gives the load that a server will have in addition to what it reported, by id.
    """

    num_tokens: int = 0
    excluded: Collection[str] = ()
    booked: Callable[[str], Booked] = lambda server_id: _NOTHING

    def counted(self, server: Candidate) -> Candidate | None:
        """Returns the server with its booked load; None if it is excluded."""
        if server.server_id in self.excluded:
            return None
        booked = self.booked(server.server_id)
        has_pages = self.num_tokens == 0 or self.num_tokens + booked.num_tokens <= server.room_tokens
        if has_pages == server.has_pages and not booked.num_sessions:
            return server
        return replace(server, seconds_per_block=_seconds_per_block(server, booked), has_pages=has_pages)


_Kind = tuple[str, Span, str, Numerics, bool]
_Role = tuple[str, Span, str]


class Replicas:
    """The ready servers of one placement.

    Args:
        servers: The candidates without booked loads. Of equal servers, the first one is chosen first, so a caller that
            shuffles them spreads sessions over them.
    """

    def __init__(self, servers: Iterable[Candidate]) -> None:
        self._alike: dict[_Kind, list[Candidate]] = {}
        self._in_role: dict[_Role, list[Candidate]] = {}
        for each in servers:
            kind = each.fingerprint, each.span, each.zone, each.numerics, each.is_suspected
            self._alike.setdefault(kind, []).append(each)
            self._in_role.setdefault(_role(each), []).append(each)
        for alike in self._alike.values():
            alike.sort(key=lambda each: each.seconds_per_block)
        self._ranks: dict[str, int] = {}
        for replicas in self._in_role.values():
            replicas.sort(key=lambda each: each.server_id)
            self._ranks.update((each.server_id, rank) for rank, each in enumerate(replicas))

    def usable(self, session: PlannedSession, num_of_each: int = 2) -> list[Candidate]:
        """Returns the servers among which a cheapest chain for the session is found, with their booked loads.

        Args:
            num_of_each: How many servers of one kind the chain may need: two, if others hold only blocks in the middle
                of their span.
        """
        return [server for alike in self._alike.values() for server in _front(alike, session, num_of_each)]

    def partners(self, before: Candidate, server: Candidate) -> Sequence[Candidate]:
        """Returns the servers of a hop's role that are partners of the hop before it, without booked loads.

        The replicas of both roles, in the order of their ids, share a line from 0 to 1 evenly. Partners are those whose
        parts overlap. So `m` replicas before `n` others make at most `m + n - 1` routes, and loads can be even.
        """
        ranked, alike = self._in_role[_role(before)], self._in_role[_role(server)]
        rank, count = self._ranks[before.server_id], len(ranked)
        return alike[rank * len(alike) // count : -(-(rank + 1) * len(alike) // count)]


def _front(alike: Sequence[Candidate], session: PlannedSession, num_of_each: int) -> list[Candidate]:
    """Returns the servers of one kind than which fewer than `num_of_each` others are better or as good.

    Args:
        alike: The servers by their seconds per block, which bookings can only raise.
    """
    front: list[Candidate] = []
    full: Candidate | None = None

    def is_beaten(seconds_per_block: float, queue_seconds: float) -> bool:
        better = [
            each
            for each in front
            if each.seconds_per_block <= seconds_per_block and each.queue_seconds <= queue_seconds
        ]
        return len(better) >= num_of_each

    for server in alike:
        # The queue of no later server is shorter than none.
        if is_beaten(server.seconds_per_block, 0.0):
            break
        if server.server_id in session.excluded:
            continue
        booked = session.booked(server.server_id)
        if is_beaten(_seconds_per_block(server, booked), server.queue_seconds):
            continue
        counted = session.counted(server)
        if counted is not None and counted.has_pages:
            front.append(counted)
        elif full is None:
            full = counted
    # A full server shows that its blocks have servers, only none with room.
    return front or ([full] if full is not None else [])


def _seconds_per_block(server: Candidate, booked: Booked) -> float:
    return server.seconds_per_block + booked.num_sessions * server.session_seconds


def _role(server: Candidate) -> _Role:
    """Returns what replicas of each other have in common."""
    return server.fingerprint, server.span, server.zone
