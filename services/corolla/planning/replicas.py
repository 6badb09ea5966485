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
from operator import attrgetter
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
"""What replicas of each other have in common: weights, span and zone."""


@dataclass(slots=True)
class _Known:
    """A server, and its seconds per block when they were last looked up. Sessions only raise them."""

    server: Candidate
    seconds: float


class _Alike:
    """The servers of one kind, by their known seconds per block.

    Args:
        ids: In the order in which equal ones are chosen.

    Attributes:
        is_stale: They were others, or sessions have raised their seconds.
    """

    def __init__(self, kind: _Kind, ids: Sequence[str]) -> None:
        self.kind = kind
        self._ids = ids
        self.is_stale = True

    def refresh(self, by_id: Mapping[str, Candidate]) -> None:
        """Takes the servers as they are now."""
        self.is_stale = False
        servers = [by_id[server_id] for server_id in self._ids]
        self.known = sorted((_Known(each, each.seconds_per_block) for each in servers), key=attrgetter("seconds"))
        # This one fills a text as fast as any of them that holds nothing of it.
        self.fastest = replace(
            servers[0], server_id="", prompt_seconds=min(each.prompt_seconds for each in servers),
            fetch_seconds=min(each.fetch_seconds for each in servers),
        )  # fmt: skip

    def move_back(self, raised: Collection[_Known]) -> None:
        """Moves servers whose seconds have risen behind their equals, so that equals take turns."""
        self.is_stale = True
        ids = {each.server.server_id for each in raised}
        self.known = [each for each in self.known if each.server.server_id not in ids]
        for each in raised:
            insort(self.known, each, key=attrgetter("seconds"))


class _InRole:
    """The ids of the replicas of one role.

    Args:
        servers: In the order in which equal ones are chosen.
    """

    def __init__(self, servers: Sequence[Candidate]) -> None:
        self.places = {each.server_id: place for place, each in enumerate(servers)}
        self.ranked = sorted(self.places)
        self.ranks = {server_id: rank for rank, server_id in enumerate(self.ranked)}
        by_kind: dict[_Kind, list[str]] = {}
        for each in servers:
            by_kind.setdefault(_kind(each), []).append(each.server_id)
        self.alike = {kind: _Alike(kind, ids) for kind, ids in by_kind.items()}
        self.alike_of = {server_id: self.alike[kind] for kind, ids in by_kind.items() for server_id in ids}


class Replicas:
    """The ready servers of one placement.

    Args:
        servers: The candidates without booked loads. Of equal servers, the first one is chosen first.

    Attributes:
        by_id: These by id, in this order.
    """

    def __init__(self, servers: Iterable[Candidate] = ()) -> None:
        self._turn = 0.0
        self.by_id = {each.server_id: each for each in servers}
        in_role: dict[_Role, list[Candidate]] = {}
        for each in self.by_id.values():
            in_role.setdefault(_role(each), []).append(each)
        self._in_role = {role: _InRole(replicas) for role, replicas in in_role.items()}
        self._refresh()

    def update(self, changed: Mapping[str, Candidate | None], turn: float) -> None:
        """Takes the candidates of the next placement, those of each role `in_turn`, and forgets what sessions raised.

        Args:
            changed: The candidates that are new or others than before, by id; None for those that are gone.
        """
        if turn != self._turn:
            self._turn, changed = turn, {**self.by_id, **changed}
            self.by_id, self._in_role = {}, {}
        came: dict[_Role, dict[str, Candidate]] = {}
        for server_id, now in changed.items():
            before = self.by_id.get(server_id)
            if before is not None and now is not None and self._stays(server_id, before, now):
                self.by_id[server_id] = now
                continue
            if before is not None:
                came.setdefault(_role(before), {})
            if now is None:
                self.by_id.pop(server_id, None)
            else:
                self.by_id[server_id] = now
                came.setdefault(_role(now), {})[server_id] = now
        for role, replicas in came.items():
            self._build(role, replicas)
        if came:
            self._in_role = dict(sorted(self._in_role.items(), key=lambda each: each[1].ranked[0]))
            self.by_id = {each: self.by_id[each] for known in self._in_role.values() for each in known.places}
        self._refresh()

    def _stays(self, server_id: str, before: Candidate, now: Candidate) -> bool:
        """The server is in the place where it was: only its times and its room are others."""
        alike = self._in_role[_role(before)].alike_of[server_id]
        alike.is_stale = True
        return alike.kind == _kind(now)

    def _build(self, role: _Role, replicas: dict[str, Candidate]) -> None:
        """Puts servers into a role, with those that stay in it."""
        earlier = self._in_role.pop(role, None)
        for server_id in earlier.places if earlier is not None else ():
            if server_id in self.by_id and _role(self.by_id[server_id]) == role:
                replicas[server_id] = self.by_id[server_id]
        if replicas:
            self._in_role[role] = _InRole(in_turn(replicas.values(), self._turn))

    def _refresh(self) -> None:
        for replicas in self._in_role.values():
            for alike in replicas.alike.values():
                if alike.is_stale:
                    alike.refresh(self.by_id)

    def usable(self, session: PlannedSession, num_of_each: int = 2, blocks: Span | None = None) -> list[Candidate]:
        """Returns the servers among which a cheapest chain for the session is found, with their booked loads.

        Args:
            blocks: The blocks that the chain covers; None: all blocks.
            num_of_each: How many servers of one kind the chain may need: two, if others hold only blocks in the middle
                of their span.
        """
        holders: dict[_Kind, list[Candidate]] = {}
        known = [self.by_id[server_id] for server_id in session.held if server_id in self.by_id]
        for holder in sorted(known, key=lambda each: self._in_role[_role(each)].places[each.server_id]):
            holders.setdefault(_kind(holder), []).append(holder)
        return [
            server
            for role, replicas in self._in_role.items()
            if blocks is None or (role[1].start < blocks.end and blocks.start < role[1].end)
            for kind, alike in replicas.alike.items()
            for server in _front(alike, holders.get(kind, ()), session, num_of_each)
        ]

    def partners(self, before: Candidate, server: Candidate) -> Sequence[Candidate]:
        """Returns the servers of a hop's role that are partners of the hop before it, without booked loads.

        The replicas of both roles, in the order of their ids, share a line from 0 to 1 evenly. Partners are those whose
        parts overlap. So `m` replicas before `n` others make at most `m + n - 1` routes, and loads can be even.
        """
        own, alike = self._in_role[_role(before)], self._in_role[_role(server)].ranked
        rank, count = own.ranks[before.server_id], len(own.ranked)
        ids = alike[rank * len(alike) // count : -(-(rank + 1) * len(alike) // count)]
        return [self.by_id[server_id] for server_id in ids]


def in_turn(replicas: Iterable[Candidate], turn: float) -> list[Candidate]:
    """Returns the servers of one role in the order in which equal ones are chosen.

    All planners have them in one order, round a circle, and begin at different ones. If their turns are spread evenly,
    so are the sessions that they place between two heartbeats, when they do not know of each other's.

    Args:
        turn: Where this planner begins, from 0 to 1.
    """
    ranked = sorted(replicas, key=attrgetter("server_id"))
    first = int(turn * len(ranked)) % len(ranked)
    return [*ranked[first:], *ranked[:first]]


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
