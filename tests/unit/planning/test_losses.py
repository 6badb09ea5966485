"""What the loss of a server would cost, and which servers have no standby."""

import math
from typing import Any

import pytest

from corolla.planning.losses import lacks, loss_seconds
from corolla.planning.standbys import Lack
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb


def placed(server_id: str, start: int, end: int, prompt_speed: float = 1000.0, **facts: Any) -> pb.PlacedServer:
    """A ready server on a node of its own, whose speed for prompts is in tokens per second through one block."""
    server = pb.ServerDescription(
        server_id=server_id, address=f"{facts.pop('node', server_id)}:1", fingerprint=facts.pop("fingerprint", "f"),
        prefill_tokens_per_second=prompt_speed,
    )  # fmt: skip
    span = common_pb2.BlockSpan(start=start, end=end)
    state = facts.pop("state", pb.SERVER_STATE_READY)
    suspected = facts.pop("suspected", False)
    return pb.PlacedServer(server=server, span=span, state=state, suspected=suspected, load=pb.ServerLoad(**facts))


def test_the_other_servers_of_the_blocks_share_the_work_by_their_speed() -> None:
    servers = [
        placed("lost", 0, 15, 1.0, num_tokens_at_risk=4000),
        placed("fast", 0, 15, 30_000.0),
        placed("slow", 0, 15, 10_000.0, num_tokens_at_risk=10),
    ]
    seconds = loss_seconds(servers)
    assert seconds["lost"] == pytest.approx(1.5)
    assert seconds["fast"] == 0
    assert seconds["slow"] == pytest.approx(15 * 10 / 30_001)


def test_each_block_goes_to_the_servers_that_have_it() -> None:
    servers = [placed("lost", 0, 4, num_tokens_at_risk=100), placed("a", 0, 3, 100.0), placed("b", 2, 9, 300.0)]
    assert loss_seconds(servers)["lost"] == pytest.approx(2 * 100 / 100 + 100 / 400 + 100 / 300)


def test_a_loss_has_no_end_where_a_block_has_no_other_server() -> None:
    others = [
        placed("other weights", 0, 4, fingerprint="g"),
        placed("suspected", 0, 4, suspected=True),
        placed("joining", 0, 4, state=pb.SERVER_STATE_JOINING),
        placed("half", 0, 2),
    ]
    assert math.isinf(loss_seconds([placed("lost", 0, 4, num_tokens_at_risk=1), *others])["lost"])
    assert loss_seconds([placed("idle", 0, 4), *others])["idle"] == 0


def test_a_suspected_server_has_tokens_at_risk_and_helps_no_other_one() -> None:
    servers = [placed("a", 0, 4, num_tokens_at_risk=1000), placed("b", 0, 4, num_tokens_at_risk=1000, suspected=True)]
    assert loss_seconds(servers) == {"a": math.inf, "b": pytest.approx(4.0)}


LOAD: dict[str, Any] = {"num_sessions": 4, "num_tokens_at_risk": 400, "numerics": "a"}


@pytest.mark.parametrize(
    "others, lack",
    [
        ([], Lack.SERVER),
        ([placed("b", 0, 9, numerics="a"), placed("c", 1, 10, numerics="a")], Lack.SERVER),
        ([placed("b", 0, 10, numerics="a", fingerprint="g")], Lack.SERVER),
        ([placed("b", 0, 10, numerics="a", suspected=True)], Lack.SERVER),
        ([placed("b", 0, 10, numerics="b"), placed("c", 0, 10)], Lack.NUMERICS),
        ([placed("b", 0, 10, numerics="b"), placed("c", 0, 10, numerics="a", max_session_tokens=99)], Lack.ROOM),
        ([placed("b", 0, 10, numerics="a", node="own")], Lack.NODE),
        ([placed("b", 0, 20, numerics="a+head", max_session_tokens=100)], None),
    ],
)
def test_a_standby_has_the_blocks_the_numerics_room_and_another_node(
    others: list[pb.PlacedServer], lack: Lack | None
) -> None:
    assert lacks([placed("own", 0, 10, **LOAD), *others]).get("own") == lack


def test_two_servers_stand_by_for_each_other() -> None:
    assert lacks([placed("a", 0, 10, **LOAD), placed("b", 0, 10, **LOAD)]) == {}
