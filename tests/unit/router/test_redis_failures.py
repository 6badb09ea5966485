"""What errors of Redis mean, by the texts that Redis 6.2 and 7.2 send."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from redis._parsers import BaseParser
from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError

from corolla.chassis.errors import StoreUnavailable
from corolla.router.metrics import RouterMetrics
from corolla.router.store import RedisFailure, Store, code_of, failure_of

_IN_A_SCRIPT_OF_6 = "ERR Error running script (call to f_0c1): @user_script:12: @user_script: 12: -{}"
_IN_A_SCRIPT_OF_7 = "{} script: 0c1, on @user_script:12."
_CODES = {
    "READONLY You can't write against a read only replica.": RedisFailure.OUTAGE,
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": RedisFailure.OUTAGE,
    "CLUSTERDOWN The cluster is down": RedisFailure.OUTAGE,
    "TRYAGAIN Multiple keys request during rehashing of slot": RedisFailure.OUTAGE,
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL.": RedisFailure.OUTAGE,
    "LOADING Redis is loading the dataset in memory": RedisFailure.OUTAGE,
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": RedisFailure.OUTAGE,
    "OOM command not allowed when used memory > 'maxmemory'.": RedisFailure.FULL,
    "MISCONF Redis is configured to save RDB snapshots, but is unable to persist to disk.": RedisFailure.NO_WRITES,
    "NOREPLICAS Not enough good replicas to write.": RedisFailure.NO_WRITES,
}
_OTHERS = {
    "MOVED 866 10.0.0.2:6379": RedisFailure.OUTAGE,
    "NOAUTH Authentication required.": RedisFailure.NO_ACCESS,
    "WRONGPASS invalid username-password pair or user is disabled.": RedisFailure.NO_ACCESS,
    "NOPERM this user has no permissions to run the 'set' command": RedisFailure.NO_ACCESS,
    "ERR DB index is out of range": RedisFailure.NO_ACCESS,
    "ERR max number of clients reached": RedisFailure.OUTAGE,
    "ERR unknown command 'EVALSHA'": RedisFailure.OUTAGE,
    "WRONGTYPE Operation against a key holding the wrong kind of value": RedisFailure.BAD_RECORD,
    _IN_A_SCRIPT_OF_6.format("WRONGTYPE Operation against a key").replace("-W", "W"): RedisFailure.BAD_RECORD,
    "ERR user_script:9: attempt to compare number with nil script: 0c1, on @user_script:9.": RedisFailure.BAD_RECORD,
    "ERR hash value is not an integer": RedisFailure.BAD_RECORD,
}
_ALL = {
    **_OTHERS,
    **_CODES,
    **{form.format(text): meant for form in (_IN_A_SCRIPT_OF_6, _IN_A_SCRIPT_OF_7) for text, meant in _CODES.items()},
}


@pytest.mark.parametrize("text, meant", _ALL.items())
def test_what_a_reply_means(text: str, meant: RedisFailure) -> None:
    error = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    assert failure_of(error) is meant
    if text.startswith("READONLY") or "-READONLY" in text:
        assert code_of(error) == "READONLY"


@pytest.mark.parametrize(
    "error, meant",
    [
        (RedisConnectionError("Connection closed by server."), RedisFailure.OUTAGE),
        (ConnectionResetError(), RedisFailure.OUTAGE),
        (TimeoutError(), RedisFailure.OUTAGE),
        (RuntimeError("unable to perform operation on <TCPTransport closed=True>"), RedisFailure.OUTAGE),
        (RuntimeError("dictionary changed size during iteration"), RedisFailure.BUG),
        (DataError("Invalid input of type: 'list'"), RedisFailure.BUG),
    ],
)
def test_what_an_error_of_this_process_means(error: Exception, meant: RedisFailure) -> None:
    assert failure_of(error) is meant


async def test_a_cancellation_that_nobody_asked_for_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An essential task of the router would end by it, and with that the process."""

    async def ends_with_its_future(*_: object, **__: object) -> None:
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    store = Store("redis://127.0.0.1:1/0", 0.1, RouterMetrics(CollectorRegistry()))
    for name in ("disconnect", "get_connection"):
        monkeypatch.setattr(BlockingConnectionPool, name, ends_with_its_future)
        with pytest.raises(StoreUnavailable):
            await store.models()
