"""Says when every block has a server, by what servers that join say of themselves."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from corolla.v1 import router_pb2 as pb

_MOST_MORE_S: Final = 60.0
"""How much longer than usual callers wait for servers that join."""
_LATE_S: Final = 2.0
"""A server may be ready so much later than it said, since its next heartbeat and the router's next push take time."""


def ready_in_seconds(
    servers: Iterable[pb.PlacedServer], num_blocks: int, fingerprint: str, lost: Collection[str] = ()
) -> float:
    """Returns the seconds until each block has a ready server; infinite: some block has none, and none that says when.

    For example, blocks 0:4 have a ready server, blocks 2:8 one that is ready in 5 seconds, and blocks 6:8 one that is
    ready in 3 seconds: all blocks have one in 5 seconds, since 4:6 need the second one.

    Args:
        fingerprint: The weights that servers must have.
        lost: The ids of servers that do not count.
    """
    soonest = [math.inf] * num_blocks
    for each in servers:
        if each.server.fingerprint != fingerprint or each.server.server_id in lost:
            continue
        if each.state == pb.SERVER_STATE_READY and not each.suspected:
            seconds = 0.0
        elif each.state == pb.SERVER_STATE_JOINING and each.load.start_seconds_left:
            seconds = each.load.start_seconds_left
        else:
            continue
        for block in range(each.span.start, min(each.span.end, num_blocks)):
            soonest[block] = min(soonest[block], seconds)
    return max(soonest, default=math.inf)


@dataclass(eq=False)
class Promises:
    """Remembers when servers that join said that they would be ready, since one that comes no nearer does not count."""

    _ends_s: dict[str, float] = field(init=False, default_factory=dict)

    def late(self, servers: Iterable[pb.PlacedServer], now_s: float) -> set[str]:
        """The ids of servers that are still joining after twice the time that they said earlier."""
        ends_s = {}
        for each in servers:
            if each.state == pb.SERVER_STATE_JOINING and (seconds := each.load.start_seconds_left):
                server_id = each.server.server_id
                ends_s[server_id] = min(self._ends_s.get(server_id, math.inf), now_s + 2 * seconds + _LATE_S)
        self._ends_s = ends_s
        return {server_id for server_id, end_s in ends_s.items() if end_s < now_s}


def waits_until(give_up_s: float, ready_in_s: float, now_s: float, until_s: float) -> float:
    """Returns the time until which a caller waits for a chain.

    Args:
        give_up_s: Until when it waits if no server says when it is ready.
        ready_in_s: What `ready_in_seconds` says; 0: each block has a server.
        until_s: When the caller stops waiting.
    """
    if not ready_in_s or math.isinf(ready_in_s):
        return give_up_s
    return min(until_s, give_up_s + _MOST_MORE_S, max(give_up_s, now_s + ready_in_s + _LATE_S))
