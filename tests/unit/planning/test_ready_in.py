"""When every block has a server, and how long a caller waits for that."""

import math
from typing import Any

import pytest

from corolla.planning.ready_in import Promises, ready_in_seconds, waits_until
from corolla.v1 import router_pb2 as pb
from corolla.wire.span import Span

READY, JOINING = pb.SERVER_STATE_READY, pb.SERVER_STATE_JOINING


def placed(name: str, start: int, end: int, ready_in_s: float | None = None, **facts: Any) -> pb.PlacedServer:
    load = pb.ServerLoad() if ready_in_s is None else pb.ServerLoad(start_seconds_left=ready_in_s)
    state = facts.pop("state", READY if ready_in_s is None else JOINING)
    server = pb.ServerDescription(server_id=name, fingerprint=facts.pop("fingerprint", "f"))
    return pb.PlacedServer(server=server, span=Span(start, end).to_message(), state=state, load=load, **facts)


@pytest.mark.parametrize(
    "servers, expected",
    [
        ([placed("a", 0, 4), placed("b", 2, 8, 5.0), placed("c", 6, 8, 3.0)], 5.0),
        ([placed("a", 0, 4), placed("b", 4, 8, 5.0), placed("c", 4, 8, 3.0)], 3.0),
        ([placed("a", 0, 8)], 0.0),
        ([placed("a", 0, 4), placed("b", 4, 7, 5.0)], math.inf),
        ([placed("a", 0, 4), placed("b", 4, 8, state=JOINING)], math.inf),
        ([placed("a", 0, 4), placed("b", 4, 8, 5.0, fingerprint="other")], math.inf),
        ([placed("a", 0, 8, suspected=True)], math.inf),
        ([placed("lost", 0, 8), placed("b", 0, 8, 7.0)], 7.0),
        ([], math.inf),
    ],
)
def test_the_last_block_that_gets_a_server_decides(servers: list[pb.PlacedServer], expected: float) -> None:
    assert ready_in_seconds(servers, 8, "f", lost={"lost"}) == expected


@pytest.mark.parametrize(
    "ready_in_s, until_s, expected",
    [
        (math.inf, math.inf, 130.0),
        (0.0, math.inf, 130.0),
        (5.0, math.inf, 130.0),
        (40.0, math.inf, 142.0),
        (1000.0, math.inf, 190.0),
        (40.0, 135.0, 135.0),
    ],
)
def test_a_caller_waits_longer_for_servers_that_join(ready_in_s: float, until_s: float, expected: float) -> None:
    assert waits_until(130.0, ready_in_s, 100.0, until_s) == expected


def test_nobody_waits_for_a_server_that_comes_no_nearer() -> None:
    promises = Promises()
    for now_s in range(13):
        nearer, standing = placed("nearer", 0, 8, 100.0 - now_s), placed("standing", 0, 8, 5.0)
        assert promises.late([nearer, standing, placed("ready", 0, 8)], now_s) == set()
    assert promises.late([nearer, standing], 12.5) == {"standing"}
    assert promises.late([nearer], 13.0) == promises.late([standing], 14.0) == set(), "a server that left is forgotten"
