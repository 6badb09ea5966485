"""When heartbeats go out."""

import asyncio

import pytest

from corolla.block_server.registration import Registration
from corolla.v1 import router_pb2


@pytest.mark.parametrize("asked_s, hurried_s", [(0.1, 0.1), (1.5, 0.25), (6.0, 1.0)])
async def test_a_server_that_keeps_spans_asks_more_often(asked_s: float, hurried_s: float) -> None:
    registration = Registration(
        "127.0.0.1:1", router_pb2.ServerDescription(), router_pb2.ServerLoad, interval_s=asked_s
    )
    assert registration.next_interval_s == asked_s
    registration.is_hurried = lambda: True
    assert registration.next_interval_s == hurried_s
    await registration.close()


async def test_a_hurried_heartbeat_follows_the_one_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registration = Registration("127.0.0.1:1", router_pb2.ServerDescription(), router_pb2.ServerLoad, interval_s=60.0)
    said: list[int] = []
    is_under_way, is_heard, has_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def heartbeat() -> None:
        said.append(registration.state)
        is_under_way.set()
        if registration.state == router_pb2.SERVER_STATE_READY:
            has_ready.set()
        await is_heard.wait()

    monkeypatch.setattr(registration, "send_heartbeat", heartbeat)
    keeping = asyncio.create_task(registration.run())
    async with asyncio.timeout(10):
        await is_under_way.wait()
        registration.state = router_pb2.SERVER_STATE_READY
        registration.request_heartbeat()
        is_heard.set()
        await has_ready.wait()
    assert said == [router_pb2.SERVER_STATE_JOINING, router_pb2.SERVER_STATE_READY]
    keeping.cancel()
    await asyncio.wait({keeping})
    await registration.close()
