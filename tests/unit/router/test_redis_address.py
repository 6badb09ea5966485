"""Which addresses of Redis a router takes, and whom it asks for the primary."""

from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff

from corolla.router.redis_address import connect


def made(pool: Any) -> Any:
    """A connection, before it connects."""
    return pool.make_connection()


def pool_of(url: str, password: str = "") -> SentinelConnectionPool:
    client = connect(url, Retry(NoBackoff(), 0), timeout_s=0.25, answer_s=None, password=password)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    return pool


async def test_an_address_of_sentinels_names_hosts_service_database_and_logins() -> None:
    pool = pool_of(
        "redis+sentinel://me:p%40ss%2Fword@[::1]:6000,one,two:5000/the%20store/3?sentinel_username=it&sentinel_password=w%2C"
    )
    assert (pool.service_name, pool.connection_class) == ("the store", SentinelManagedConnection)
    assert pool.is_master
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("::1", 6000), ("one", 26379), ("two", 5000)]
    connection = made(pool)
    assert (connection.username, connection.password, connection.db) == ("me", "p@ss/word", 3)
    for sentinel in pool.sentinel_manager.sentinels:
        asking = made(sentinel.connection_pool)
        assert (asking.username, asking.password, asking.db) == ("it", "w,", 0)
        assert asking.socket_timeout == asking.socket_connect_timeout == 0.25
        assert asking.retry.get_retries() == 0


async def test_a_password_of_redis_may_come_from_elsewhere() -> None:
    pool = pool_of("redis+sentinel://one/store", password="elsewhere")
    assert made(pool).password == "elsewhere"
    assert made(pool.sentinel_manager.sentinels[0].connection_pool).password is None


async def test_sentinels_and_redis_speak_tls() -> None:
    pool = pool_of("rediss+sentinel://one,two/store?ssl_ca_certs=/etc/ca.crt&ssl_check_hostname=false")
    asking = made(pool.sentinel_manager.sentinels[1].connection_pool)
    connection = made(pool)
    assert (type(connection), type(asking)) == (SentinelManagedSSLConnection, SSLConnection)
    for each in (connection, asking):
        assert (each.ca_certs, each.check_hostname, each.ssl_context.cert_reqs.name) == (
            "/etc/ca.crt", False, "CERT_REQUIRED",
        )  # fmt: skip


@pytest.mark.parametrize(
    "rest",
    ["/store", "one", "one/", "one,/store", "one:many/store", "one/store/zero", "one/store/0/1", "one/store?x=1"],
)
async def test_an_address_of_sentinels_that_says_too_little_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=r"write it like redis://.*, or redis\+sentinel://") as caught:
        pool_of(f"redis+sentinel://:hush@{rest}")
    assert "hush" not in str(caught.value)
