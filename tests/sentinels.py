"""A primary Redis, a replica of it, and three Sentinels, which replace the primary when it is lost."""

import secrets
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

from redis.asyncio import Redis
from redis.exceptions import RedisError

from corolla.local.ports import Ports
from tests.embedded_redis import EmbeddedRedis
from tests.integration.waiting import until
from tests.tls_doors import TlsDoors

_HOST: Final = "127.0.0.1"
_SERVICE: Final = "the-store"
_PASSWORD: Final = "of@Redis/1"
_SENTINELS_PASSWORD: Final = "of,Sentinels:2"
_NUM_SENTINELS: Final = 3
_QUORUM: Final = 2
# A fail-over too many, where the machine pauses for longer, does no harm.
_SILENCE_MS: Final = 500
# Twice this time passes between two fail-overs.
_FAILOVER_MS: Final = 1000


class WatchedRedis:
    """Two Redis servers, one of which is the primary, and the Sentinels that say which.

    Args:
        is_encrypted: whether the address is one for TLS.

    Attributes:
        url: the address that routers get.
        doors: what TLS comes through; None without it.
    """

    def __init__(self, folder: Path, *, is_encrypted: bool = False) -> None:
        self._folder = folder
        self.doors = TlsDoors(folder / "tls") if is_encrypted else None
        ports = Ports()
        self._first, self._second, *self._watching = (ports.free() for _ in range(2 + _NUM_SENTINELS))
        self._servers: dict[int, EmbeddedRedis] = {}
        self._running = ExitStack()
        hosts = ",".join(f"{_HOST}:{port}" for port in self._watching)
        login, password = quote(_PASSWORD, safe=""), quote(_SENTINELS_PASSWORD, safe="")
        self.url = f"redis+sentinel://:{login}@{hosts}/{_SERVICE}/0?sentinel_password={password}"
        if self.doors is not None:
            self.url = f"{self.url.replace('redis', 'rediss', 1)}&ssl_ca_certs={self.doors.authority_file}"

    def __enter__(self) -> Self:
        self.start(self._first)
        self.start(self._second, f"replicaof {_HOST} {self._first}")
        # Sentinels that are told of each other and of the replica do not have to find them first.
        names = {port: secrets.token_hex(20) for port in self._watching}
        for port, name in names.items():
            others = [other for other in self._watching if other != port]
            settings = [
                f"myid {name}",
                f"monitor {_SERVICE} {_HOST} {self._first} {_QUORUM}",
                f'auth-pass {_SERVICE} "{_PASSWORD}"',
                f"down-after-milliseconds {_SERVICE} {_SILENCE_MS}",
                f"failover-timeout {_SERVICE} {_FAILOVER_MS}",
                f"known-replica {_SERVICE} {_HOST} {self._second}",
                *(f"known-sentinel {_SERVICE} {_HOST} {other} {names[other]}" for other in others),
            ]
            self._launch(port, _SENTINELS_PASSWORD, *(f"sentinel {setting}" for setting in settings))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()
        if self.doors is not None:
            self.doors.close()

    def start(self, port: int, *lines: str) -> None:
        """Starts the server of this port, empty; it is a primary until the Sentinels learn of it."""
        named = [f"replica-announce-port {port}", f'masterauth "{_PASSWORD}"', *lines]
        self._servers[port] = self._launch(port, _PASSWORD, *named)

    def kill(self, port: int) -> None:
        self._servers[port].kill()

    def other(self, port: int) -> int:
        """Returns the port of the other server."""
        (found,) = self._servers.keys() - {port}
        return found

    async def primary(self) -> int:
        """Returns the port of the primary, once a replica has all that it holds."""
        found: list[int] = []

        async def is_replicated() -> bool:
            roles = {port: await self._role(port) for port in self._servers}
            found[:] = [port for port, (role, _) in roles.items() if role == "primary"]
            return len(found) == 1 and len({offset for _, offset in roles.values()}) == 1

        await until(is_replicated)
        return found[0]

    async def freeze(self) -> None:
        """Holds the primary up until the Sentinels name another one; it wakes, and does not know that."""
        lost = await self.primary()
        with self._servers[lost].frozen():

            async def is_replaced() -> bool:
                return await self._named() != lost

            await until(is_replaced)

    async def demote(self) -> None:
        """Has the Sentinels make a replica of the primary, and the primary of its replica."""
        old = await self.primary()

        async def begins() -> bool:
            try:
                await self._tell_sentinel(self._watching[0], "FAILOVER", _SERVICE)
            except RedisError:
                return False
            return True

        await until(begins)

        async def is_replica() -> bool:
            role, *_ = await self._role(old)
            return role == "replica"

        await until(is_replica)

    async def replace(self) -> EmbeddedRedis:
        """Has the Sentinels name the replica as the primary. The old one lives on, and takes writes."""
        old = await self.primary()
        new = self.other(old)
        async with Redis.from_url(self._servers[new].url) as client:
            await client.slaveof()
        for port in self._watching:
            await self._tell_sentinel(port, "REMOVE", _SERVICE)
            await self._tell_sentinel(port, "MONITOR", _SERVICE, _HOST, new, 1)
            await self._tell_sentinel(port, "SET", _SERVICE, "auth-pass", _PASSWORD)
        return self._servers[new]

    async def _named(self) -> int:
        """The port of the primary, as a Sentinel names it."""
        _, port = await self._tell_sentinel(self._watching[0], "GET-MASTER-ADDR-BY-NAME", _SERVICE)
        return int(port)

    async def _tell_sentinel(self, port: int, *command: str | int) -> Any:
        async with Redis(host=_HOST, port=port, password=_SENTINELS_PASSWORD) as sentinel:
            return await sentinel.execute_command("SENTINEL", *command)  # type: ignore[no-untyped-call]

    async def _role(self, port: int) -> tuple[str, int]:
        """Which part the server plays, and how many bytes it has of what is replicated."""
        async with Redis.from_url(self._servers[port].url) as client:
            try:
                role: list[Any] = await client.role()
            except RedisError:
                return "none", -1
        return ("primary", role[1]) if role[0] == b"master" else ("replica", role[4])

    def _launch(self, port: int, password: str, *lines: str) -> EmbeddedRedis:
        behind = port
        if self.doors is not None:
            self.doors.open(port, behind := Ports().free())
        server = EmbeddedRedis.start(self._folder / str(port), behind, password=password, lines=lines)
        self._running.callback(server.stop)
        return server
