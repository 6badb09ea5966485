"""What a client service takes for the servers that there are."""

from typing import Any

import pytest

from corolla.client.chain.placement import PlacementWatch
from corolla.client.chain.routes import Routes
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb


def placement(*names: str, complete: bool) -> pb.Placement:
    servers = [pb.PlacedServer(server=pb.ServerDescription(server_id=name, address=name[0] + ":1")) for name in names]
    return pb.Placement(servers=servers, cheapest_chain=common_pb2.Chain() if complete else None)


def names(watch: PlacementWatch) -> list[str]:
    return [each.server.server_id for each in watch.servers]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 100.0}
    loop: Any = type("Loop", (), {"time": lambda self: now["s"]})()
    monkeypatch.setattr("corolla.client.chain.placement.asyncio.get_running_loop", lambda: loop)
    return now


def test_servers_that_a_store_forgot_count_for_a_few_seconds(clock: dict[str, float]) -> None:
    watch = PlacementWatch(control=None)  # type: ignore[arg-type]
    assert names(watch) == []
    watch._take(placement("a1", "b1", complete=True))
    watch._take(placement(complete=False))
    assert names(watch) == ["a1", "b1"]
    clock["s"] += 3
    # The newer incarnation at an address stands for the older one.
    watch._take(placement("a2", complete=False))
    assert names(watch) == ["a2", "b1"]
    clock["s"] += 2.1
    assert names(watch) == ["a2"]
    watch._take(placement("a2", "b2", complete=True))
    assert names(watch) == ["a2", "b2"]


def test_a_complete_placement_needs_no_memory(clock: dict[str, float]) -> None:
    watch = PlacementWatch(control=None)  # type: ignore[arg-type]
    watch._take(placement("a1", "b1", "c1", complete=True))
    watch._take(placement("a1", "b1", complete=True))
    assert names(watch) == ["a1", "b1"]


async def test_who_left_and_is_gone_is_remembered_no_longer() -> None:
    watch = PlacementWatch(control=None)  # type: ignore[arg-type]
    routes = Routes(None, watch, "f", 5)  # type: ignore[arg-type]
    for number in range(100):
        watch._take(placement(f"a{number}", f"b{number}", complete=True))
        routes.leaves(f"a{number}")
        routes.leaves(f"b{number}")
    assert routes._avoided() == {"a99", "b99"}
