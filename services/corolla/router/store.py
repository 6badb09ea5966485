"""Calls Redis, with one Lua script for each decision, short time-outs, and one error for every outage.

Redis begins the text of an error with a code, which redis-py turns into a class, or leaves in the text. Redis 6 repeats
an error of a script after the place where it happened: `Error running script (call to f_...): @user_script:12:
@user_script: 12: -READONLY You can't write against a read only replica.`
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum
from functools import cache
from importlib import resources
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    DataError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from corolla.chassis.breaker import Breaker
from corolla.chassis.errors import InternalError, StartupError, StoreUnavailable
from corolla.chassis.tasks import TaskGroup
from corolla.router.metrics import RouterMetrics
from corolla.router.redis_address import connect, follow_primary

log = logging.getLogger(__name__)


class RedisFailure(Enum):
    """What an error means."""

    OUTAGE = "outage"
    """This Redis cannot serve now, or is no longer the right one. A new connection may lead to another one."""
    NO_ACCESS = "no access"
    """Redis refuses the login, the database, or a command to this user; else the same as OUTAGE."""
    FULL = "full"
    """Redis has no memory left. It refuses writes that need some, and answers everything else."""
    NO_WRITES = "no writes"
    """Redis cannot store or replicate, and refuses all writes. It answers everything else."""
    BAD_RECORD = "bad record"
    """Redis is well, and a key has another type or value than a router writes."""
    BUG = "bug"
    """The error does not come from Redis or the network, but from this program."""


ANSWERED: Final = frozenset({RedisFailure.FULL, RedisFailure.NO_WRITES, RedisFailure.BAD_RECORD})
"""Failures of a Redis that answers other calls: they neither open the breaker nor end connections."""

_ON_A_CLOSED_TRANSPORT: Final = "unable to perform operation on <"
_NO_ACCESS: Final = (AuthenticationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)
# A key of another type, and a script that failed on a value.
_BAD_RECORD: Final = re.compile(r"(.*@user_script: ?\d+: )?(WRONGTYPE |user_script: ?\d+: |.* is not an integer)")
_CODE: Final = re.compile(r"(?:.*@user_script: ?\d+: )?-?(?P<code>[A-Z]+) ")
_NO_CODE: Final = "ERR"
_BY_CODE: Final = {
    "OOM": RedisFailure.FULL,
    "MISCONF": RedisFailure.NO_WRITES,
    "NOREPLICAS": RedisFailure.NO_WRITES,
}


def failure_of(error: Exception) -> RedisFailure:
    """Returns what an error of a call to Redis means.

    Args:
        error: A RedisError; an OSError; or a RuntimeError, which uvloop raises for a write to a connection that was
            just reset: "unable to perform operation on <TCPTransport closed=True ...>; the handler is closed".
    """
    text = str(error)
    if not isinstance(error, RedisError):
        is_reset = not isinstance(error, RuntimeError) or text.startswith(_ON_A_CLOSED_TRANSPORT)
        return RedisFailure.OUTAGE if is_reset else RedisFailure.BUG
    if isinstance(error, DataError):
        return RedisFailure.BUG
    if isinstance(error, _NO_ACCESS) or text == "DB index is out of range":
        return RedisFailure.NO_ACCESS
    if not isinstance(error, ResponseError):
        return RedisFailure.OUTAGE
    if _BAD_RECORD.match(text):
        return RedisFailure.BAD_RECORD
    # Most codes mean that another Redis should answer, such as READONLY, MASTERDOWN, CLUSTERDOWN and UNBLOCKED.
    return _BY_CODE.get(code_of(error), RedisFailure.OUTAGE)


def code_of(error: Exception) -> str:
    """Returns the code that Redis gave an error, such as `READONLY`; empty if the error does not come from Redis."""
    code = error.status_code if isinstance(error, RedisError) else None
    if code in (None, _NO_CODE) and isinstance(error, ResponseError) and (found := _CODE.match(str(error))):
        code = found["code"]
    return code or ""


def _is_silence(error: Exception) -> bool:
    return isinstance(error, RedisTimeoutError | TimeoutError)


_NUM_RETRIES: Final = 1
_MAX_SILENCES: Final = 2
_REST_S: Final = 0.5
_MODELS_KEY: Final = "corolla:models"
_FAILURES: Final = (RedisError, OSError, RuntimeError)
# Those after which the same call may succeed on a new connection.
_WORTH_A_RETRY: Final[Any] = (RedisConnectionError, RedisTimeoutError, RuntimeError, ReadOnlyError)
_MOST_LOGGED: Final = 1000
_PROBE_KEY: Final = "corolla:writable"
_PROBE_MS: Final = 1000
_UNAVAILABLE: Final = "the store does not answer, or is not ready"
_NO_PRIMARY: Final = "no Sentinel that answers knows a primary of this service; check its name, and the passwords"
_REFUSALS: Final = {
    RedisFailure.FULL: "the store has no memory left for this, until sessions end or Redis gets more memory",
    RedisFailure.NO_WRITES: "the store accepts no writes at the moment, because Redis cannot save or replicate them",
}


def key_prefix(model: str) -> str:
    """Returns the prefix of all keys of a model; the braces keep the keys on one node of a Redis cluster."""
    return f"corolla:{{{model}}}:"


@contextmanager
def _cancellable() -> Iterator[None]:
    """Raises a cancellation that redis-py has lost: before Python 3.12, its `asyncio.wait_for` may do so.

    Where the task itself was not cancelled, the connection was lost: redis-py raises a cancellation, too, where a
    connection by TLS ends while a call on it times out.
    """
    task = asyncio.current_task()
    num_cancels = task.cancelling() if task else 0
    try:
        yield
    except asyncio.CancelledError:
        if task is None or task.cancelling() > num_cancels:
            raise
        raise RedisConnectionError("the connection was lost") from None
    if task and task.cancelling() > num_cancels:
        raise asyncio.CancelledError


@cache
def script_text(name: str) -> str:
    folder = resources.files("corolla.router") / "scripts"
    return "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", name))


class Store:
    """A Redis server, or the primary that Sentinels name.

    Every method raises StoreUnavailable when Redis refuses, or twice does not answer within `timeout_s`. A script may
    have run nevertheless, so every script may safely run again. After two such calls, a breaker refuses further ones at
    once, except one every half second, so that requests do not queue up behind a frozen Redis. `failure_of` says
    which errors of Redis count as such: after one of them the next calls connect anew, and so reach the new primary
    that another server may have become, behind the same name or by the word of Sentinels. A call without an answer
    costs only its own connection if Redis answers on a new one.

    A key that cannot be read, such as one of another type, is not an outage: methods then raise InternalError.

    Args:
        password: The password, unless `url` has one.
        silence_s: How long Redis is silent before the log says so: a machine may be busy or stand still for a moment.

    Raises:
        StartupError: `url` is not a Redis address.
    """

    def __init__(
        self, url: str, timeout_s: float, metrics: RouterMetrics, *, password: str = "", silence_s: float = 2.0
    ) -> None:
        self._metrics = metrics
        self._silence_s = silence_s
        self._failing_since_s = 0.0
        self._is_said = False
        self._url = url
        self._password = password
        self._timeout_s = timeout_s
        self._tasks = TaskGroup()
        self._trial: asyncio.Task[None] | None = None
        # Why Redis counts as away; None while it is well.
        self._failure: RedisFailure | None = None
        self._next_probe_s = 0.0
        self._breaker = Breaker(_MAX_SILENCES, _REST_S)
        self._scripts: dict[str, AsyncScript] = {}
        self._logged: set[tuple[str, ...]] = set()
        try:
            self._client = self._connect(url, timeout_s, Retry(NoBackoff(), _NUM_RETRIES, _WORTH_A_RETRY))
            # A wait for a change takes longer than `timeout_s`. The caller repeats it, so this client does not.
            self._waiting = self._connect(url, None, Retry(NoBackoff(), 0))
        except ValueError as failure:
            raise StartupError(f"COROLLA_REDIS_URL is {failure}") from None

    def _connect(self, url: str, answer_s: float | None, retry: Retry) -> Redis:
        return connect(url, retry, timeout_s=self._timeout_s, answer_s=answer_s, password=self._password)

    async def check(self) -> None:
        """Checks that Redis answers.

        Raises:
            StartupError: Redis answers, but refuses access.
            StoreUnavailable: Redis does not answer, or is not ready yet.
        """
        try:
            with _cancellable():
                await self._client.ping()
        except _FAILURES as error:
            match failure_of(error):
                case RedisFailure.BUG:
                    raise
                case RedisFailure.NO_ACCESS:
                    raise StartupError(
                        "Redis refused the login; correct the user, password and database in COROLLA_REDIS_URL"
                    ) from None
            raise StoreUnavailable(_NO_PRIMARY if isinstance(error, MasterNotFoundError) else _UNAVAILABLE) from None

    async def follow_primary(self) -> None:
        """Goes on at the primary that Sentinels name now, if they name one."""
        for client in (self._client, self._waiting):
            with suppress(*_FAILURES), _cancellable():
                await follow_primary(client)

    async def call(self, name: str, model: str, *arguments: str | bytes | int) -> Any:
        """Calls the script `scripts/<name>.lua` on a model's keys and returns its reply."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._client.register_script(script_text(name))
        started = time.perf_counter()
        try:
            async with self._translated(name, model):
                return await script(keys=[key_prefix(model)], args=arguments)
        finally:
            self._metrics.script_seconds.labels(name).observe(time.perf_counter() - started)

    async def remember_model(self, model: str) -> None:
        async with self._translated("remember_model"):
            await self._client.sadd(_MODELS_KEY, model)

    async def forget_model(self, model: str) -> None:
        async with self._translated("forget_model"):
            await self._client.srem(_MODELS_KEY, model)

    async def models(self) -> list[str]:
        """Returns the names of the models that have had a block server and are not forgotten, sorted."""
        async with self._translated("models"):
            names: Any = await self._client.smembers(_MODELS_KEY)
        models = []
        for name in names:
            try:
                models.append(name.decode())
            except UnicodeDecodeError:
                self.skip("model", "", repr(name[:64]))
        return sorted(models)

    async def wait_for_change(self, model: str, last_change: str, wait_s: float) -> None:
        """Returns as soon as the model's placement has changed since `last_change`, at the latest after `wait_s`."""
        async with self._translated("wait_for_change", model, is_wait=True), asyncio.timeout(wait_s + self._timeout_s):
            await self._waiting.xread({key_prefix(model) + "changes": last_change}, block=max(1, round(wait_s * 1000)))

    def skip(self, kind: str, model: str, name: str) -> None:
        """Counts a record that cannot be read, and logs it the first time."""
        self._metrics.unreadable_records.labels(model, kind).inc()
        record = (kind, model, name)
        if record not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(record)
            log.error(
                "skipping a record in Redis that cannot be read", extra={"kind": kind, "model": model, "record": name}
            )

    async def close(self) -> None:
        await self._tasks.close()
        for client in (self._client, self._waiting):
            await client.aclose(close_connection_pool=True)

    @asynccontextmanager
    async def _translated(self, operation: str, model: str = "", *, is_wait: bool = False) -> AsyncIterator[None]:
        clock = asyncio.get_running_loop().time
        if not is_wait and not self._breaker.admits(clock()):
            raise StoreUnavailable(_UNAVAILABLE)
        failure: RedisFailure | None = None
        with _cancellable():
            try:
                with _cancellable():
                    yield
            except _FAILURES as error:
                failure = await self._examined(error)
            if failure is None and self._failure is not None:
                await self._probe()
        if failure is None or failure in ANSWERED:
            self._breaker.succeeded()
        elif not is_wait:
            self._breaker.failed(clock())
        if failure is RedisFailure.BAD_RECORD:
            self.skip("key", model, operation)
            raise InternalError("the store holds a record that cannot be read")
        if failure is not None:
            raise StoreUnavailable(_REFUSALS.get(failure, _UNAVAILABLE))

    async def _examined(self, error: Exception) -> RedisFailure:
        """Returns what an error means, and notes it. Raises it anew if it is a bug."""
        failure = failure_of(error)
        if failure is RedisFailure.BUG:
            raise error
        if failure is not RedisFailure.BAD_RECORD:
            cause = "full" if failure is RedisFailure.FULL else code_of(error) or type(error).__name__
            self._note(failure, cause, is_silence=_is_silence(error))
        if _is_silence(error):
            # Many calls may meet the same silence.
            if self._trial is None or self._trial.done():
                self._trial = self._tasks.start(self._try_connections(), "connections to Redis")
        elif failure not in ANSWERED:
            await self._connect_anew()
        return failure

    async def _try_connections(self) -> None:
        """Ends the connections if they lead to a primary that was replaced, or if Redis does not answer on a new one.

        redis-py has ended the connection of the call that was not answered.
        """
        await self.follow_primary()
        client = self._connect(self._url, self._timeout_s, Retry(NoBackoff(), 0))
        try:
            with _cancellable():
                await client.ping()
        except _FAILURES:
            await self._connect_anew()
        finally:
            await client.aclose(close_connection_pool=True)

    async def _connect_anew(self) -> None:
        """Ends idle connections now, and those in use with their calls."""
        for client in (self._client, self._waiting):
            with suppress(*_FAILURES), _cancellable():
                await client.connection_pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
                await client.connection_pool.disconnect(inuse_connections=False)

    async def _probe(self) -> None:
        """Tries a write while Redis counts as away: one that refuses writes may answer other calls all the time."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_probe_s:
            return
        try:
            with _cancellable():
                await self._client.set(_PROBE_KEY, 1, px=_PROBE_MS)
        except _FAILURES as error:
            self._next_probe_s = now_s + _REST_S
            await self._examined(error)
        else:
            self._note(None, "")

    def _note(self, failure: RedisFailure | None, cause: str, *, is_silence: bool = False) -> None:
        self._metrics.store_up.set(failure is None)
        now_s = asyncio.get_running_loop().time()
        if self._failure is None:
            self._failing_since_s = now_s
        if failure is None:
            if self._is_said:
                log.info("redis is back")
            self._is_said = False
        elif not self._is_said and (not is_silence or now_s - self._failing_since_s >= self._silence_s):
            log.warning("redis does not answer, or refuses calls; retrying", extra={"cause": cause})
            self._is_said = True
        self._failure = failure
