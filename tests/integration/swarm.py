"""A whole stack in this process, over real gRPC and a real Redis: the quickest way to many chains."""

import asyncio
import atexit
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import pytest_asyncio
from pydantic import SecretStr
from redis.asyncio import Redis

from corolla.block_server.handover.sender import HandoverLink
from corolla.block_server.invariants import Violation
from corolla.block_server.service import BlockServer
from corolla.block_server.settings import BlockServerSettings
from corolla.client.service import USUAL_BOUNDS, ClientBounds, ClientService
from corolla.client.settings import ClientSettings
from corolla.router.intervals import USUAL_INTERVALS, RouterIntervals
from corolla.router.service import RouterProcess
from corolla.router.settings import RouterSettings
from corolla.sdk.async_client import AsyncClient
from corolla.trust.workload import Role
from corolla.v1 import blocks_pb2, blocks_pb2_grpc, router_pb2, router_pb2_grpc
from corolla.wire.network import Network
from tests.checkpoints import CONTEXT_LENGTH, make_tiny_checkpoint
from tests.embedded_redis import EmbeddedRedis
from tests.identities import Identities
from tests.integration.waiting import until
from tests.integration.wires import Wires

_HERE: dict[str, Any] = {"host": "127.0.0.1", "metrics_host": "127.0.0.1", "metrics_port": 0, "grace_s": 0.5}
_ONE_THREAD: dict[str, Any] = {"threads": 1}
# A tiny model has nothing to gain by better kernels, and many of them would take seconds to compile.
_BY_LIBRARY: dict[str, Any] = {"products": "library"}
# Servers of one process share its event loop, and tests hold up what one computes.
_MAX_INLINE_S = 0.0
_NUM_DATABASES = 16


@cache
def _shared_redis() -> EmbeddedRedis:
    """The Redis of this process' swarms, each of which has a database of it."""
    folder = tempfile.TemporaryDirectory(prefix="corolla-redis-")
    atexit.register(folder.cleanup)
    server = EmbeddedRedis.start(Path(folder.name))
    atexit.register(server.stop)
    return server


_free_databases = list(range(_NUM_DATABASES))


class Swarm:
    """Router, block servers and client services for one checkpoint.

    Args:
        folder: where the log of a Redis of its own goes.
        model: checkpoint folder.
        spans: one block server for each, `"start:end"` or `"auto"`.
        num_clients: client services.
        server: further settings of the block servers; `client` and `router` likewise.
        max_tokens_per_frame: of a step on the block servers; None: as their settings say.
        bounds: of the client services.
        intervals: of the router.
        api_key: what its own calls are made with, where the client services have keys configured.
        own_redis: whether it has a Redis to itself, because that will be broken.
        is_encrypted: whether everything between the services is TLS, with certificates of both ends.
    """

    redis: EmbeddedRedis

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
        max_tokens_per_frame: int | None = None,
        bounds: ClientBounds = USUAL_BOUNDS,
        intervals: RouterIntervals = USUAL_INTERVALS,
        api_key: str | None = None,
        own_redis: bool = False,
        is_encrypted: bool = False,
    ) -> None:
        self._folder = folder
        self._model = str(model)
        self._spans = spans
        self._num_clients = num_clients
        self._server_settings = server or {}
        self._client_settings = client or {}
        self._router_settings = router or {}
        self._max_tokens_per_frame = max_tokens_per_frame
        self._bounds = bounds
        self._intervals = intervals
        self._api_key = api_key
        self._own_redis = own_redis
        self._identities = Identities(folder) if is_encrypted else None
        self._database = 0
        self.router: RouterProcess
        self.servers: list[BlockServer] = []
        self.clients: list[ClientService] = []
        self._wires: dict[BlockServer | ClientService, Wires] = {}

    async def __aenter__(self) -> Self:
        if self._own_redis:
            self.redis = await asyncio.to_thread(EmbeddedRedis.start, self._folder)
        else:
            self.redis, self._database = _shared_redis(), _free_databases.pop()
        # All run in this process: one that is held up must not take a Redis that lives for one that does not.
        patience: dict[str, Any] = {} if self._own_redis else {"redis_timeout_ms": 5000}
        settings = RouterSettings(
            **{
                "redis_url": SecretStr(self.redis_url),
                "port": 0,
                **_HERE,
                **patience,
                "tls_dir": self._tls_dir(Role.ROUTER, 1),
                **self._router_settings,
            }
        )
        self.router = RouterProcess(settings, intervals=self._intervals)
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
        violations = await self._violations()
        await asyncio.gather(*(server.stop() for server in self.servers))
        await self.router.stop()
        if self._own_redis:
            await asyncio.to_thread(self.redis.stop)
        else:
            async with Redis.from_url(self.redis_url) as database:
                await database.flushdb()
            _free_databases.append(self._database)
        if failure is None:
            assert not violations, violations

    async def _violations(self) -> list[Violation]:
        """The invariants that servers violate, or violated at their last check.

        They check themselves once a second; those that become idle in time check once more now. A server that a test
        has ended never becomes idle.
        """
        with suppress(TimeoutError):
            await until(self._are_idle, 0.5)
        for server in self.servers:
            if server.has_started and server.engine.is_idle:
                server.periodic_tasks.check_invariants()
        started = [server for server in self.servers if server.has_started]
        return [violation for server in started for violation in server.periodic_tasks.violations]

    async def _are_idle(self) -> bool:
        return all(server.engine.is_idle for server in self.servers if server.has_started)

    @property
    def identities(self) -> Identities:
        """Those of an encrypted one."""
        assert self._identities is not None
        return self._identities

    @property
    def redis_url(self) -> str:
        return f"{self.redis.url.rpartition('/')[0]}/{self._database}"

    @property
    def router_address(self) -> str:
        return f"127.0.0.1:{self.router.port}"

    @property
    def address(self) -> str:
        return self.address_of(0)

    def address_of(self, client: int) -> str:
        return f"127.0.0.1:{self.clients[client].port}"

    @property
    def url(self) -> str:
        """The address of the first client service for HTTP."""
        return f"http://127.0.0.1:{self.clients[0].http_port}"

    def connect(self, client: int = 0) -> AsyncClient:
        return AsyncClient(self.address_of(client), api_key=self._api_key)

    async def add_server(self, blocks: str, **settings_of_this: Any) -> BlockServer:
        given = {
            "port": 0,
            "control_port": 0,
            "model": self._model,
            **_HERE,
            **_ONE_THREAD,
            **_BY_LIBRARY,
            "tls_dir": self._tls_dir(Role.BLOCK, len(self._wires)),
            **self._server_settings,
        }
        given |= settings_of_this
        settings = BlockServerSettings(advertised_host="127.0.0.1", router=self.router_address, blocks=blocks, **given)
        wires = Wires(Network.from_folder(settings.tls_dir))
        server = BlockServer(
            settings,
            network=wires.network,
            max_inline_s=_MAX_INLINE_S,
            max_tokens_per_frame=self._max_tokens_per_frame,
        )
        self._wires[server] = wires
        await server.start()
        self.servers.append(server)
        return server

    async def add_client(self, *, bounds: ClientBounds | None = None, **settings_of_this: Any) -> ClientService:
        tls_dir = self._tls_dir(Role.CLIENT, len(self._wires))
        # The speed that servers announce would decide which answers have standbys, and a busy machine is slow.
        given = {
            "port": 0,
            "model": self._model,
            **_HERE,
            "tls_dir": tls_dir,
            "standby": "off",
            **self._client_settings,
        }
        given |= settings_of_this
        settings = ClientSettings(router=self.router_address, **given)
        wires = Wires(Network.from_folder(settings.tls_dir))
        client = ClientService(settings, network=wires.network, bounds=bounds or self._bounds)
        self._wires[client] = wires
        await client.start()
        self.clients.append(client)
        return client

    def _tls_dir(self, role: Role, number: int) -> Path | None:
        return self._identities.folder_of(role, str(number)) if self._identities is not None else None

    def wires_of(self, service: BlockServer | ClientService) -> Wires:
        """Its connections."""
        return self._wires[service]

    async def crash(self, server: BlockServer) -> None:
        """Ends its streams at once and without a farewell; the router still lists it."""
        await self.wires_of(server).hang_up()

    async def die(self, server: BlockServer) -> None:
        """Its streams break, and it says nothing more."""
        self.wires_of(server).mute()
        await self.crash(server)

    async def until_ready(self, timeout_s: float = 30) -> None:
        """Until every client service knows a complete chain."""

        async def is_ready(client: AsyncClient) -> bool:
            return (await client.models())[0].ready

        for number in range(len(self.clients)):
            async with self.connect(number) as client:
                await until(partial(is_ready, client), timeout_s)

    async def placement(self, model: str = "tiny") -> router_pb2.Placement:
        """The placement, as the router reports it."""
        async with Network.from_folder(self._tls_dir(Role.OPERATOR, 1)).open_channel(self.router_address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            return await stub.GetPlacement(router_pb2.GetPlacementRequest(model=model), timeout=30)

    async def statuses(self) -> list[blocks_pb2.BlockServerStatus]:
        """What each block server holds."""
        statuses = []
        for server in self.servers:
            operator = Network.from_folder(self._tls_dir(Role.OPERATOR, 1))
            async with operator.open_channel(f"127.0.0.1:{server.control_port}") as channel:
                stub = blocks_pb2_grpc.BlockServiceStub(channel)
                statuses.append(await stub.GetStatus(blocks_pb2.GetBlockServerStatusRequest()))
        return statuses

    async def forget(self, number: int) -> None:
        """A block server loses its only session, as when its lease runs out."""
        server, status = self.servers[number], (await self.statuses())[number]
        (held,) = server.sessions
        link = HandoverLink(server.address, Network.from_folder(self._tls_dir(Role.BLOCK, 0)).connect)
        async with link.connect(status.fingerprint):
            link.send(blocks_pb2.Close(session_id=held.request.session_id, epoch=held.request.epoch))
            await until(lambda: not server.sessions)

    async def until_empty(self, timeout_s: float = 30) -> None:
        """Until no block server holds a session or a page."""

        async def is_empty() -> bool:
            return all(
                not each.num_sessions and each.num_free_pages == each.num_pages for each in await self.statuses()
            )

        await until(is_empty, timeout_s)


def tiny_swarm(
    spans: Sequence[str],
    *,
    context_length: int = CONTEXT_LENGTH,
    edit: Callable[[Path], object] = lambda model: None,
    keys: str = "",
    quotas: Mapping[str, Mapping[str, Any]] | None = None,
    server: Mapping[str, Any] | None = None,
    client: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A fixture: the swarm of a test module, with a tiny model.

    Args:
        context_length: of the model.
        edit: changes files in the folder of the model.
        keys: the file of callers' keys; empty: everybody may call.
        quotas: limits and guarantees of each tenant.
        server: further settings of the block servers; `client` likewise.
        options: of the `Swarm`.
    """

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def swarm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Swarm]:
        folder = tmp_path_factory.mktemp("swarm")
        of_server, of_client = {**(server or {})}, {**(client or {})}
        if keys:
            of_client["api_keys_file"] = folder / "keys"
            of_client["api_keys_file"].write_text(keys)
        if quotas:
            of_server["quotas_file"] = of_client["quotas_file"] = folder / "quotas"
            of_client["quotas_file"].write_text(json.dumps({"tenants": quotas}))
        changes = {"max_position_embeddings": context_length}
        model = make_tiny_checkpoint("llama", folder / "tiny", config_changes=changes)
        edit(model)
        async with Swarm(folder, model, spans, server=of_server, client=of_client, **options) as running:
            yield running

    return swarm
