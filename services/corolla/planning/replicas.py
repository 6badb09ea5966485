"""Groups the servers of a placement by what replicas have in common, so that a plan looks at few of them. Pure.

Of servers with the same weights, span, zone and numerics, a cheapest chain needs only those that no other one beats,
both for each block and at its entry: the Pareto front. Each plan finds the fronts anew, since sessions exclude other
servers and need different room. But the servers of a kind are in the order of their costs, and the search ends where
all later ones are beaten. So a plan takes about as long with a thousand servers as with ten.

The order follows the sessions that plans book: a server's cost is looked up when its turn comes, and moves it back if
it has risen. Costs fall with the next placement only.
"""

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

from corolla.planning.apart import ALL_TOGETHER, Apart
from corolla.planning.bookings import Booked
from corolla.planning.planner import Candidate
from corolla.planning.standbys import can_give
from corolla.wire.numerics import Numerics
from corolla.wire.span import Span

ANSWER_TOKENS: Final = 64
"""The planner spreads the time for a prompt over so many tokens of an answer that may be longer."""

_NOTHING = Booked()


@dataclass(frozen=True)
class PlannedSession:
    """The session for which servers are chosen.

    Attributes:
        num_tokens: The number of tokens for which a server needs free pages; 0: it needs none.
        excluded: The ids of servers that must not be in the chain.
        booked: Gives the load that a server will have in addition to what it reported, by id.
        held: How many of the text's first tokens a server is known to hold, by id.
        givers: The servers of these from which others may fetch what they hold.
        new_tokens: The most tokens of the answer.
        held_in_common: Whether running sessions are taken to hold those tokens, so that they need no room; otherwise
            their pages may be among the free ones, since they are only cached.
        apart: The servers that must not be neighbours.
    """

    num_tokens: int = 0
    excluded: Collection[str] = ()
    booked: Callable[[str], Booked] = lambda server_id: _NOTHING
    held: Mapping[str, int] = field(default_factory=dict)
    new_tokens: float = math.inf
    givers: Sequence[Candidate] = ()
    held_in_common: bool = True
    apart: Apart = ALL_TOGETHER

    @cached_property
    def most_held(self) -> int:
        """How many tokens the server has that holds most of the text."""
        return max(self.held.values(), default=0)

    def filling_seconds(self, server: Candidate) -> float:
        """Returns the seconds per block, for each token of the answer, for what the server lacks of the text.

        That is what another server holds of the text and this one does not. It fetches tokens if that takes less time
        than to compute them, and if they are on a server that computes alike.
        """
        num_held, num_blocks = self.held.get(server.server_id, 0), len(server.span)
        given = (self.held[each.server_id] for each in self.givers if can_give(each, server, server.span))
        num_given = max(0, max(given, default=0) - num_held)
        seconds = server.computing_seconds(self.most_held - num_held - num_given, num_blocks) + min(
            server.computing_seconds(num_given, num_blocks), server.fetching_seconds(num_given, num_blocks)
        )
        return seconds / num_blocks / min(ANSWER_TOKENS, max(1, self.new_tokens))

    def counted(self, server: Candidate) -> Candidate | None:
        """Returns the server with its booked load and the text that it lacks; None if it is excluded."""
        return None if server.server_id in self.excluded else self.with_seconds(server, self.seconds(server))

    def seconds(self, server: Candidate) -> float:
        """Returns the seconds per block with the booked load and the text that the server lacks."""
        return self.loaded_seconds(server) + (self.filling_seconds(server) if self.held else 0.0)

    def loaded_seconds(self, server: Candidate) -> float:
        """Returns the seconds per block with the booked load, which are the same for any session."""
        return server.seconds_per_block + self.booked(server.server_id).num_sessions * server.session_seconds

    def with_seconds(self, server: Candidate, seconds: float) -> Candidate:
        """Returns the server with these seconds per block, and with whether it has pages for the session."""
        has_pages = self._has_room(server, self.held.get(server.server_id, 0))
        if has_pages == server.has_pages and seconds == server.seconds_per_block:
            return server
        return replace(server, seconds_per_block=seconds, has_pages=has_pages)

    def _has_room(self, server: Candidate, num_shared: int) -> bool:
        num_more = max(1, self.num_tokens - num_shared * self.held_in_common)
        num_tokens = self.num_tokens and num_more + self.booked(server.server_id).num_tokens
        return num_tokens <= server.room_tokens

    def shared(self, server_ids: Iterable[str]) -> int:
        """How many of the text's first tokens all of these servers are known to hold."""
        return min(self.held.get(each, 0) for each in server_ids)

    def poorer(self, chain: Sequence[Candidate]) -> set[str]:
        """The servers of a chain that hold so little of the text that others have no room for the rest; often none.

        The session is written on all servers from where the shortest beginning ends.
        """
        shared = self.shared(each.server_id for each in chain)
        if all(self._has_room(each, shared) for each in chain):
            return set()
        return {each.server_id for each in chain if self.held.get(each.server_id, 0) == shared}


class _Kind(NamedTuple):
    """What makes servers alike: of those that are, a chain needs the cheapest only."""

    fingerprint: str
    span: Span
    zone: str
    numerics: Numerics
    is_suspected: bool


_Role = tuple[str, Span, str]


@dataclass(slots=True)
class _Known:
    """A server, and its seconds per block when they were last looked up. Sessions only raise them."""

    server: Candidate
    seconds: float


class _Alike:
    """The servers of one kind, by their known seconds per block."""

    def __init__(self, servers: Iterable[Candidate]) -> None:
        known = [_Known(each, each.seconds_per_block) for each in servers]
        self.known = sorted(known, key=attrgetter("seconds"))
        # This one fills a text as fast as any of them that holds nothing of it.
        self.fastest = replace(
            known[0].server, server_id="", prompt_seconds=min(each.server.prompt_seconds for each in known),
            fetch_seconds=min(each.server.fetch_seconds for each in known),
        )  # fmt: skip

    def move_back(self, raised: Collection[_Known]) -> None:
        """Moves servers whose seconds have risen behind their equals, so that equals take turns."""
        ids = {each.server.server_id for each in raised}
        self.known = [each for each in self.known if each.server.server_id not in ids]
        for each in raised:
            insort(self.known, each, key=attrgetter("seconds"))


class Replicas:
    """The ready servers of one placement.

    Args:
        servers: The candidates without booked loads. Of equal servers, the first one is chosen first; see `in_turn`.
    """

    def __init__(self, servers: Iterable[Candidate]) -> None:
        by_kind: dict[_Kind, list[Candidate]] = {}
        self._in_role: dict[_Role, list[Candidate]] = {}
        self._by_id: dict[str, tuple[int, Candidate]] = {}
        for number, each in enumerate(servers):
            self._by_id[each.server_id] = number, each
            by_kind.setdefault(_kind(each), []).append(each)
            self._in_role.setdefault(_role(each), []).append(each)
        self._alike = {kind: _Alike(alike) for kind, alike in by_kind.items()}
        self._ranks: dict[str, int] = {}
        for replicas in self._in_role.values():
            replicas.sort(key=lambda each: each.server_id)
            self._ranks.update((each.server_id, rank) for rank, each in enumerate(replicas))

    def usable(self, session: PlannedSession, num_of_each: int = 2, blocks: Span | None = None) -> list[Candidate]:
        """Returns the servers among which a cheapest chain for the session is found, with their booked loads.

        Args:
            blocks: The blocks that the chain covers; None: all blocks.
            num_of_each: How many servers of one kind the chain may need: two, if others hold only blocks in the middle
                of their span.
        """
        holders: dict[_Kind, list[Candidate]] = {}
        known = (self._by_id[server_id] for server_id in session.held if server_id in self._by_id)
        for _, holder in sorted(known, key=itemgetter(0)):
            holders.setdefault(_kind(holder), []).append(holder)
        return [
            server
            for kind, alike in self._alike.items()
            if blocks is None or (kind.span.start < blocks.end and blocks.start < kind.span.end)
            for server in _front(alike, holders.get(kind, ()), session, num_of_each)
        ]

    def partners(self, before: Candidate, server: Candidate) -> Sequence[Candidate]:
        """Returns the servers of a hop's role that are partners of the hop before it, without booked loads.

        The replicas of both roles, in the order of their ids, share a line from 0 to 1 evenly. Partners are those whose
        parts overlap. So `m` replicas before `n` others make at most `m + n - 1` routes, and loads can be even.
        """
        ranked, alike = self._in_role[_role(before)], self._in_role[_role(server)]
        rank, count = self._ranks[before.server_id], len(ranked)
        return alike[rank * len(alike) // count : -(-(rank + 1) * len(alike) // count)]


def in_turn(servers: Iterable[Candidate], turn: float) -> list[Candidate]:
    """Returns the servers so that those of each role begin at another one; among equals, the first is chosen first.

    All planners have the replicas of a role in one order, round a circle. If their turns are spread evenly, so are the
    sessions that they place between two heartbeats, when they do not know of each other's.

    Args:
        turn: Where this planner begins, from 0 to 1.
    """
    roles: dict[_Role, list[Candidate]] = {}
    for each in sorted(servers, key=lambda each: each.server_id):
        roles.setdefault(_role(each), []).append(each)
    found = []
    for replicas in roles.values():
        first = int(turn * len(replicas)) % len(replicas)
        found += [*replicas[first:], *replicas[:first]]
    return found


class _Front:
    """Collects the servers of one kind that fewer than `num_of_each` others beat for a session."""

    def __init__(self, session: PlannedSession, num_of_each: int) -> None:
        self._session = session
        self._num_of_each = num_of_each
        self._found: list[Candidate] = []
        self._full: Candidate | None = None

    def is_beaten(self, seconds_per_block: float, queue_seconds: float = 0.0) -> bool:
        """No server with these times would be in the front."""
        better = [
            each
            for each in self._found
            if each.seconds_per_block <= seconds_per_block and each.queue_seconds <= queue_seconds
        ]
        return len(better) >= self._num_of_each

    def consider(self, server: Candidate) -> None:
        """Adds the server to the front unless others beat it."""
        if server.server_id in self._session.excluded:
            return
        seconds = self._session.seconds(server)
        if self.is_beaten(seconds, server.queue_seconds):
            return
        counted = self._session.with_seconds(server, seconds)
        if counted.has_pages:
            self._found.append(counted)
        elif self._full is None:
            self._full = counted

    def servers(self) -> list[Candidate]:
        """Returns the front; without one, a full server of the kind if there is one."""
        # A full server shows that its blocks have servers, only none with room.
        return self._found or ([self._full] if self._full is not None else [])


def _front(alike: _Alike, holders: Sequence[Candidate], session: PlannedSession, num_of_each: int) -> list[Candidate]:
    """Returns the front of one kind.

    Args:
        holders: The servers of this kind that hold some of the session's text.
    """
    ids = {each.server_id for each in holders}
    # The others lack all that the best one holds.
    least_more = session.filling_seconds(alike.fastest)
    while True:
        front = _Front(session, num_of_each)
        for server in holders:
            front.consider(server)
        raised: list[_Known] = []
        for known in alike.known:
            # No later server is faster, and the queue of none is shorter than none.
            if front.is_beaten(known.seconds + least_more):
                break
            seconds = session.loaded_seconds(known.server)
            if seconds > known.seconds:
                known.seconds = seconds
                raised.append(known)
            elif known.server.server_id not in ids:
                front.consider(known.server)
        if not raised:
            return front.servers()
        alike.move_back(raised)


def _kind(server: Candidate) -> _Kind:
    return _Kind(server.fingerprint, server.span, server.zone, server.numerics, server.is_suspected)


def _role(server: Candidate) -> _Role:
    """Returns what replicas of each other have in common."""
    return server.fingerprint, server.span, server.zone
