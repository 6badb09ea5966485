"""Keeps servers that do not reach each other out of neighbouring hops. Pure.

Each hop of a chain sends to the next one, and the last hop to the first one, since tokens go round a ring. So a chain
fails at its first token if two neighbours do not reach each other. The planner (`planning/planner`) does not know
pairs: with them, the cost of a hop would depend on the hop before it. Therefore a chain with such a pair is planned
again in two ways: without the servers that the first of the two does not reach, and without the first of the two. One
of these plans has each chain that lacks the pair, unless that chain has both servers, with others between them.

An example (test_apart.py runs it): a1 and a2 hold blocks 0:4, b1 and b2 blocks 4:8. a1 and b1 are the fastest, and
neither of them reaches the other.

    server          a1    a2    b1    b2
    ms per block    2     4     2     3

    plan            all servers    without b1    without a1
    chain           a1, b1         a1, b2        a2, b1
    ms per token    18             22            26

The chain a1, b2 is taken. If a network is cut in two, each server is apart from all of the other side. Then the plan
without these has a chain on one side, however many replicas there are, so few plans are enough.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from corolla.chassis.errors import NoChain, OutOfPages
from corolla.planning.planner import PlannedChain
from corolla.v1 import router_pb2 as pb

MOST_PLANS: Final = 8
"""After so many plans, the cheapest chain that was found is taken."""


class Apart:
    """The servers that do not reach each other, by id.

    Args:
        pairs: The pairs, in any order.
        known: More pairs.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = (), known: "Apart | None" = None) -> None:
        self._known = known
        self._others: dict[str, set[str]] = {}
        for one, other in pairs:
            self._others.setdefault(one, set()).add(other)
            self._others.setdefault(other, set()).add(one)

    def of(self, server_ids: Collection[str]) -> frozenset[str]:
        """Returns the servers that one of these does not reach."""
        found = frozenset(other for each in server_ids for other in self._others.get(each, ()))
        return found if self._known is None else found | self._known.of(server_ids)

    def among(self, server_ids: Sequence[str], working: Collection[str] = ()) -> tuple[str, str] | None:
        """Returns the first neighbours of a chain that are apart, the last and the first server included; or None.

        Args:
            working: The servers that have been neighbours in this chain. Two of them are not apart, whatever is said.
        """
        following = (*server_ids[1:], *server_ids[:1])
        neighbours = zip(server_ids, following, strict=True)
        return next((pair for pair in neighbours if pair[1] in self.of(pair[:1]) and not {*pair} <= {*working}), None)


ALL_TOGETHER: Final = Apart()
"""Every server reaches every other one."""


def pairs_apart(servers: Collection[pb.PlacedServer]) -> Iterator[tuple[str, str]]:
    """Yields the ids of the servers of a placement that say that they do not reach each other."""
    ids = {each.server.address: each.server.server_id for each in servers}
    for each in servers:
        own = each.server.server_id
        others = (ids.get(address, own) for address in each.load.unreachable)
        yield from ((own, other) for other in others if other != own)


def plan_together(
    apart: Apart, plan: Callable[[frozenset[str]], PlannedChain], excluded: Iterable[str] = ()
) -> PlannedChain:
    """Returns the cheapest chain without neighbours that are apart; with such neighbours if no other one is found.

    Args:
        plan: Plans a chain without the servers of these ids. It may raise NoChain or OutOfPages.
        excluded: The ids of servers that must not be in the chain.

    Raises:
        NoChain, OutOfPages: Without the excluded servers, there is no chain.
    """
    first = plan(frozenset(excluded))
    best: PlannedChain | None = None
    num_plans, waiting = 1, deque([(frozenset(excluded), first)])
    while waiting:
        without, chain = waiting.popleft()
        if best is not None and best.seconds <= chain.seconds:
            continue
        pair = apart.among([hop.server.server_id for hop in chain.hops])
        if pair is None:
            best = chain
            continue
        for more in (apart.of(pair[:1]), frozenset(pair[:1])):
            if num_plans < MOST_PLANS:
                num_plans += 1
                with suppress(NoChain, OutOfPages):
                    waiting.append((without | more, plan(without | more)))
    return best or first
