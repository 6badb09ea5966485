"""Says what the loss of a server would cost now, and which servers have no standby. Pure."""

import math
from collections import Counter
from collections.abc import Collection
from typing import Final

from corolla.planning.candidates import by_fingerprint
from corolla.planning.planner import Candidate
from corolla.planning.standbys import Lack, lack_of
from corolla.v1 import router_pb2 as pb

_MICRO: Final = 1_000_000


def loss_seconds(servers: Collection[pb.PlacedServer]) -> dict[str, float]:
    """Returns for each ready server, by id, how long others would compute if it were lost now.

    They compute the texts of its running sessions again, unless a standby holds these, and share the work on a block by
    their speed for prompts. For example, a server of blocks 0:15 is lost whose sessions hold 4,000 tokens. Two others
    hold these blocks, and compute prompts with 30,000 and 10,000 tokens per second through one block. So they need 15 *
    4,000 / 40,000 = 1.5 seconds. The time is infinite if no other server has one of the blocks.
    """
    num_tokens = {each.server.server_id: each.load.num_tokens_at_risk for each in servers}
    seconds: dict[str, float] = {}
    for group in by_fingerprint(servers):
        speeds = Counter[int]()
        for each in group:
            for block in _blocks(each):
                speeds[block] += _speed(each)
        for each in group:
            seconds[each.server_id] = sum(
                _seconds(num_tokens[each.server_id], speeds[block] - _speed(each)) for block in _blocks(each)
            )
    return seconds


def lacks(servers: Collection[pb.PlacedServer]) -> dict[str, Lack]:
    """Returns what is missing for a standby of each ready server that has none, by id.

    A standby holds all blocks of the server, has its numerics, and has room for one more session like those of the
    server. It is on another node, since the loss of a node would take both.
    """
    loads = {each.server.server_id: each.load for each in servers}
    found: dict[str, Lack] = {}
    for group in by_fingerprint(servers):
        for each in group:
            load = loads[each.server_id]
            num_tokens = max(1, load.num_tokens_at_risk // max(1, load.num_sessions))
            lacking = {lack_of(other, each, each.span, num_tokens) for other in group}
            if None not in lacking:
                # The server that lacks least.
                found[each.server_id] = max(filter(None, lacking), key=list(Lack).index)
    return found


def _blocks(server: Candidate) -> range:
    return range(server.span.start, server.span.end)


def _speed(server: Candidate) -> int:
    """Returns the micro-tokens of prompts per second through one block: whole numbers, whose sums are exact."""
    return 0 if server.is_suspected else max(1, round(_MICRO / server.prompt_seconds))


def _seconds(num_tokens: int, speed: int) -> float:
    if num_tokens == 0:
        return 0.0
    return num_tokens * _MICRO / speed if speed else math.inf
