"""A whole stack in this process, over real gRPC and a real Redis: the quickest way to many chains."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import SecretStr

from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.chassis.channels import open_channel
from corolla.client.service import ClientService
from corolla.client.settings import ClientSettings
from corolla.local.redis_server import EmbeddedRedis
from corolla.router.service import RouterProcess
from corolla.router.settings import RouterSettings
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2, blocks_pb2_grpc, router_pb2, router_pb2_grpc
from tests.integration.waiting import until

_HERE: dict[str, Any] = {"host": "127.0.0.1", "metrics_host": "127.0.0.1", "metrics_port": 0, "grace_s": 0.5}
_ONE_THREAD: dict[str, Any] = {"threads": 1}


class Swarm:
    """Router, block servers and client services for one checkpoint.

    Args:
        folder: where the log of the swarm's own Redis goes.
        model: checkpoint folder.
        spans: one block server for each, `"start:end"` or `"auto"`.
        num_clients: client services.
        server: further settings of the block servers; `client` and `router` likewise.
        api_key: what its own calls are made with, where the client services have keys configured.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        spans: Sequence[str],
        *,
        num_clients: int = 1,
        server: dict[str, Any] | None = None,
        client: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._folder = folder
        self._model = str(model)
        self._spans = spans
        self._num_clients = num_clients
        self._server_settings = server or {}
        self._client_settings = client or {}
        self._router_settings = router or {}
        self._api_key = api_key
        self.router: RouterProcess
        self.servers: list[BlockServer] = []
        self.clients: list[ClientService] = []

    async def __aenter__(self) -> Self:
        self.redis = await asyncio.to_thread(EmbeddedRedis.start, self._folder)
        settings = RouterSettings(port=0, redis_url=SecretStr(self.redis.url), **{**_HERE, **self._router_settings})
        self.router = RouterProcess(settings)
        await self.router.start()
        for span in self._spans:
            await self.add_server(span)
        for _ in range(self._num_clients):
            await self.add_client()
        await self.until_ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self.clients:
            await client.stop()
        await asyncio.gather(*(server.stop() for server in self.servers))
        await self.router.stop()
        await asyncio.to_thread(self.redis.stop)

    @property
    def router_address(self) -> str:
        return f"127.0.0.1:{self.router.port}"

    @property
    def address(self) -> str:
        return self.address_of(0)

    def address_of(self, client: int) -> str:
        return f"127.0.0.1:{self.clients[client].port}"

    def connect(self, client: int = 0) -> AsyncClient:
        return AsyncClient(self.address_of(client), api_key=self._api_key)

    async def add_server(self, blocks: str, **settings_of_this: Any) -> BlockServer:
        given = {"port": 0, "model": self._model, **_HERE, **_ONE_THREAD, **self._server_settings, **settings_of_this}
        settings = BlockServerSettings(advertised_host="127.0.0.1", router=self.router_address, blocks=blocks, **given)
        server = BlockServer(settings)
        await server.start()
        self.servers.append(server)
        return server

    async def add_client(self, **settings_of_this: Any) -> ClientService:
        given = {"port": 0, "model": self._model, **_HERE, **_ONE_THREAD, **self._client_settings, **settings_of_this}
        settings = ClientSettings(router=self.router_address, **given)
        client = ClientService(settings)
        await client.start()
        self.clients.append(client)
        return client

    async def until_ready(self, timeout_s: float = 30) -> None:
        """Until every client service knows a complete chain."""

        async def is_ready(client: AsyncClient) -> bool:
            return (await client.models())[0].ready

        for number in range(len(self.clients)):
            async with self.connect(number) as client:
                await until(partial(is_ready, client), timeout_s)

    async def placement(self, model: str = "tiny") -> router_pb2.Placement:
        """Who holds what, as the router says."""
        async with open_channel(self.router_address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            return await stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=30)

    async def statuses(self) -> list[blocks_pb2.BlockServerStatus]:
        """What each block server holds."""
        statuses = []
        for server in self.servers:
            async with open_channel(server.address) as channel:
                stub = blocks_pb2_grpc.BlockServiceStub(channel)
                statuses.append(await stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest()))
        return statuses

    async def until_empty(self, timeout_s: float = 30) -> None:
        """Until no block server holds a session or a page."""

        async def is_empty() -> bool:
            return all(
                not each.num_sessions and each.num_free_pages == each.num_pages for each in await self.statuses()
            )

        await until(is_empty, timeout_s)
