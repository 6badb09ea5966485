"""Connects to the Redis of an address: to one server, or to the primary that Sentinels name."""

from typing import Any, Final
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

MOST_CONNECTIONS: Final = 64
_SENTINEL_SCHEMES: Final = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_PORT: Final = 26379
_SENTINEL_LOGIN: Final = {"sentinel_username": "username", "sentinel_password": "password"}
FORMS: Final = (
    "redis://:password@host:6379/0, or redis+sentinel://:password@host1:26379,host2:26379,host3:26379/service/0"
)


class _PrimaryPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary of the time, whose users wait for a free one, as those of other pools do."""

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def connect(url: str, retry: Retry, *, timeout_s: float, answer_s: float | None, password: str = "") -> Redis:
    """Returns a client of the Redis at `url`, which connects at its first call.

    An address `redis+sentinel://user:password@host1,host2/service/number` names Sentinels, which know the primary of
    the service; each new connection asks them. The login is that of Redis; the Sentinels' own is in the options
    `sentinel_username` and `sentinel_password`. With `rediss+sentinel://` Sentinels and Redis speak TLS, with the
    options that `rediss://` takes, such as `ssl_ca_certs`.

    Args:
        retry: What the client does when a call fails.
        timeout_s: Seconds for which a call waits for a free connection, and a connection for its other end.
        answer_s: Seconds after which a server that does not answer counts as silent; None: never.
        password: The password of Redis, unless `url` has one.

    Raises:
        ValueError: `url` is not an address of one of these forms.
    """
    options: dict[str, Any] = {
        "password": password or None,
        "max_connections": MOST_CONNECTIONS,
        "timeout": timeout_s,
        "socket_timeout": answer_s,
        "socket_connect_timeout": timeout_s,
        "retry": retry,
    }
    try:
        is_by_sentinels = urlsplit(url).scheme in _SENTINEL_SCHEMES
        pool: BlockingConnectionPool = (
            _primary_pool(url, options) if is_by_sentinels else BlockingConnectionPool.from_url(url, **options)
        )
        # This finds an invalid option now, not at the first call.
        pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, RedisError):
        raise ValueError(f"not a Redis address; write it like {FORMS}") from None
    return Redis(connection_pool=pool)


async def follow_primary(client: Redis) -> None:
    """Has a client leave a primary in whose place its Sentinels name another one.

    Sentinels demote a primary that they have replaced after ten seconds. What it takes until then is lost.
    """
    pool = client.connection_pool
    if isinstance(pool, _PrimaryPool):
        known = pool.master_address
        if await pool.get_master_address() != known:  # type: ignore[no-untyped-call]
            await pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]


async def answers(url: str, timeout_s: float) -> bool:
    """Whether the Redis at `url` answers. Raises ValueError for an address that `connect` refuses."""
    client = connect(url, Retry(NoBackoff(), 0), timeout_s=timeout_s, answer_s=timeout_s)
    try:
        return bool(await client.ping())
    except RedisError:
        return False
    finally:
        await client.aclose(close_connection_pool=True)


def _primary_pool(url: str, options: dict[str, Any]) -> _PrimaryPool:
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    service, _, number = parts.path.removeprefix("/").partition("/")
    sentinels = [_host_and_port(host) for host in hosts.split(",")]
    if not service or not (number or "0").isdecimal():
        raise ValueError("an address of Sentinels ends in a service, and the number of a database if that is not 0")
    # What redis-py reads in the address of one server, it reads here, too.
    one = parts._replace(scheme=_SENTINEL_SCHEMES[parts.scheme], netloc=f"{login}@sentinels", path=f"/{number}")
    found: dict[str, Any] = {**options, **parse_url(one.geturl())}
    for name in ("host", "port"):
        found.pop(name, None)
    of_sentinels = {name: found.pop(key) for key, name in _SENTINEL_LOGIN.items() if key in found}
    of_sentinels |= {name: value for name, value in found.items() if name.startswith("ssl_")}
    if found.pop("connection_class", None) is SSLConnection:
        found["ssl"] = of_sentinels["ssl"] = True
    timeout_s = options["socket_connect_timeout"]
    of_sentinels |= {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # The next Sentinel is asked instead.
        "retry": Retry(NoBackoff(), 0),
    }
    manager = Sentinel(sentinels, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    return _PrimaryPool(unquote(service), manager, **found)  # type: ignore[no-untyped-call]


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("an address of Sentinels lists hosts")
    return parts.hostname, parts.port or _SENTINEL_PORT
