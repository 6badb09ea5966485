"""Which addresses a block server may connect to."""

import asyncio
from collections.abc import Sequence

from corolla.block_server.neighbours import Neighbours
from corolla.chassis.errors import RouterUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.v1 import router_pb2


class Router:
    """A router's placement, which fails while the router is away; and how often it was asked for."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = []
        self.device_ids: dict[str, str] = {}
        self.num_asked = 0

    async def placement(self) -> Sequence[router_pb2.PlacedServer]:
        self.num_asked += 1
        await asyncio.sleep(0.01)
        if self.addresses is None:
            raise RouterUnavailable("the peer is not reachable")
        described = [
            router_pb2.ServerDescription(address=address, device_id=self.device_ids.get(address, ""))
            for address in self.addresses
        ]
        return [router_pb2.PlacedServer(server=each) for each in described]


async def known(neighbours: Neighbours, *addresses: str) -> list[str]:
    """Those of them that a router names once it is asked."""
    asked = [asyncio.Event() for _ in addresses]
    for event in asked:
        neighbours.look_again(lambda _, event=event: event.set())  # type: ignore[misc]
    async with asyncio.timeout(10):
        await asyncio.gather(*(event.wait() for event in asked))
    return [address for address in addresses if neighbours.has_address(address)]


async def test_who_joins_is_found_and_who_is_placed_stays_while_no_router_answers() -> None:
    router, tasks, now_s = Router(), TaskGroup(), 0.0
    neighbours = Neighbours(router.placement, tasks, lambda: now_s)
    assert await known(neighbours, "a:1") == []
    router.addresses, now_s = ["a:1", "b:1"], 1.0
    assert await known(neighbours, "a:1", "b:1", "c:1") == ["a:1", "b:1"]
    router.addresses, now_s = None, 1000.0
    assert await known(neighbours, "a:1", "c:1") == ["a:1"]
    # A store that has lost its memory names no server for a while; later its answer counts.
    router.addresses, now_s = [], 1001.0
    assert await known(neighbours, "a:1", "c:1") == ["a:1"]
    router.addresses, now_s = ["b:1"], 1030.0
    assert await known(neighbours, "a:1", "b:1", "c:1") == ["a:1", "b:1"]
    now_s = 1062.0
    assert await known(neighbours, "a:1", "b:1", "c:1") == ["b:1"]
    await tasks.close()


async def test_what_others_know_is_taken_for_a_while() -> None:
    router, tasks, now_s = Router(), TaskGroup(), 0.0
    router.addresses = None
    neighbours = Neighbours(router.placement, tasks, lambda: now_s)
    answers: list[bool] = []
    neighbours.look_again(answers.append)
    await known(neighbours, "b:1")
    assert answers == [False]
    neighbours.take("a:1")
    assert await known(neighbours, "a:1", "b:1") == ["a:1"]
    router.addresses, now_s = [], 61.0
    neighbours.look_again(answers.append)
    assert await known(neighbours, "a:1", "b:1") == []
    assert answers == [False, True]
    await tasks.close()


async def test_all_who_wait_wait_for_one_answer() -> None:
    router, tasks = Router(), TaskGroup()
    neighbours = Neighbours(router.placement, tasks)
    assert await known(neighbours, *(f"a:{number}" for number in range(1000))) == []
    assert router.num_asked == 1
    await tasks.close()


async def test_servers_that_share_a_gpu_are_known_as_such() -> None:
    router, tasks = Router(), TaskGroup()
    neighbours = Neighbours(router.placement, tasks)
    assert neighbours.num_devices(["a:1", "b:1"]) == 2, "nothing is known yet"
    router.addresses = ["a:1", "b:1", "c:1", "d:1", "e:1"]
    router.device_ids = {"a:1": "GPU-1", "b:1": "GPU-1", "c:1": "GPU-2"}
    assert await known(neighbours, "a:1") == ["a:1"]
    assert neighbours.num_devices(["a:1", "b:1"]) == 1
    assert neighbours.num_devices(["a:1", "c:1", "b:1"]) == 2
    assert neighbours.num_devices(["d:1", "e:1"]) == 2, "servers on CPUs have no id"
