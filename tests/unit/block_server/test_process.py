"""A block server that is ordered to hold other blocks goes on serving for as long as it cannot have them."""

import asyncio
from typing import Any

import pytest

from corolla.block_server import process
from corolla.block_server.registration import Order
from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.errors import HubUnavailable
from corolla.wire.span import Span


class OrderedServer:
    """What it is to fetch cannot be had, for one reason after the other."""

    port = control_port = metrics_port = 1

    def __init__(self, settings: BlockServerSettings) -> None:
        self.failures: list[Exception] = [OSError(28, "No space left on device"), HubUnavailable("it is away")]
        self.has_stopped = False
        self.has_asked_again = asyncio.Event()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.has_stopped = True

    async def order(self) -> Order:
        if not self.failures:
            self.has_asked_again.set()
            await asyncio.Event().wait()
        return Order(Span(0, 1))

    async def fetch(self, order: Order) -> bool:
        raise self.failures.pop()


async def test_a_server_whose_next_blocks_cannot_be_fetched_serves_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers: list[OrderedServer] = []

    def build(settings: BlockServerSettings, **options: Any) -> OrderedServer:
        servers.append(OrderedServer(settings))
        return servers[-1]

    monkeypatch.setattr(process, "BlockServer", build)
    monkeypatch.setattr(process, "RETRY_INTERVAL_S", 0.0)
    given: dict[str, Any] = {"model": "tiny", "router": "nowhere:1"}
    subject = process.BlockServerProcess(BlockServerSettings(**given))
    await subject.start()
    (server,) = servers
    async with asyncio.timeout(30):
        await server.has_asked_again.wait()
    assert not server.has_stopped
    await subject.stop()
    assert server.has_stopped
