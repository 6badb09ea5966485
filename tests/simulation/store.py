"""A Redis in virtual time, which runs the router's real scripts; and the router's store on it."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry

from corolla.router.metrics import RouterMetrics
from corolla.router.store import Store
from tests.simulation.loop import VirtualLoop
from tests.simulation.lua import Status, run_script

_EPOCH_S: Final = 1_700_000_000
_LATENCY_S: Final = 0.0005


class SimulatedRedis:
    """The commands that the scripts and the store use. Times are those of the loop.

    Attributes:
        is_gone: connections are refused.
        is_frozen: no call returns; Redis executes the commands when it thaws.
        is_full: commands that need memory are refused.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._values: dict[bytes, Any] = {}
        self._ends_ms: dict[bytes, int] = {}
        self._num_changes = 0
        self._changed = asyncio.Event()
        self._thawed = asyncio.Event()
        self.is_gone = self.is_full = False
        self._thawed.set()

    # --- what happens to it ---

    def freeze(self) -> None:
        self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    def flush(self) -> None:
        """It forgets everything."""
        self._values.clear()
        self._ends_ms.clear()

    def backup(self) -> Callable[[], None]:
        """Saves the contents; calling the result restores them, and later writes are lost."""
        values, ends_ms = copy.deepcopy(self._values), dict(self._ends_ms)

        def restore() -> None:
            self._values, self._ends_ms = values, ends_ms

        return restore

    # --- clients ---

    async def ask(self, work: Callable[[], Any], timeout_s: float | None, num_retries: int) -> Any:
        """Does `work` as a command of a client would be done.

        Raises:
            RedisError: Redis does not answer in time, or is gone.
        """
        for _ in range(num_retries + 1):
            await asyncio.sleep(_LATENCY_S)
            if self.is_gone:
                raise exceptions.ConnectionError("connection refused")
            if self._thawed.is_set():
                answer = work()
                await asyncio.sleep(_LATENCY_S)
                return answer
            # Commands that wait in its buffers are done when it thaws, whether anybody waits for the answer or not.
            done = asyncio.ensure_future(self._when_thawed(work))
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(done)
            except TimeoutError:
                continue
        raise exceptions.TimeoutError("timeout")

    async def wait_for_entry(self, key: bytes, last: bytes, wait_s: float) -> None:
        """XREAD with BLOCK of one stream."""
        give_up_s = self._loop.time() + wait_s
        while True:
            if self.is_gone:
                raise exceptions.ConnectionError("connection refused")
            entries = self._find(key) or []
            if self._thawed.is_set() and entries and entries[-1][0] > _entry_id(last):
                return
            try:
                async with asyncio.timeout_at(give_up_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    def run(self, text: str, keys: list[bytes], arguments: list[bytes]) -> Any:
        """A script, in one go."""
        return run_script(text, keys, arguments, self.command)

    def command(self, name: bytes, *arguments: Any) -> Any:
        """One command; see `run_script`."""
        parts = [_argument(each) for each in arguments]
        if self.is_full and name in _NEEDS_MEMORY:
            raise exceptions.OutOfMemoryError("OOM command not allowed when used memory > 'maxmemory'.")
        return getattr(self, f"_{name.decode().lower()}")(*parts)

    async def _when_thawed(self, work: Callable[[], Any]) -> Any:
        await self._thawed.wait()
        return work()

    # --- keys ---

    def _now_ms(self) -> int:
        return round((_EPOCH_S + self._loop.time()) * 1000)

    def _find(self, key: bytes) -> Any:
        if self._ends_ms.get(key, self._now_ms() + 1) <= self._now_ms():
            self._drop(key)
        return self._values.get(key)

    def _drop(self, key: bytes) -> bool:
        self._ends_ms.pop(key, None)
        return self._values.pop(key, None) is not None

    def _made(self, key: bytes, kind: type) -> Any:
        value = self._find(key)
        if value is None:
            value = self._values[key] = kind()
        return value

    def _shrunk(self, key: bytes) -> None:
        if not self._values.get(key):
            self._drop(key)

    # --- commands ---

    def _time(self) -> list[bytes]:
        microseconds = round((_EPOCH_S + self._loop.time()) * 1_000_000)
        return [b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000)]

    def _get(self, key: bytes) -> Any:
        return self._find(key)

    def _mget(self, *keys: bytes) -> list[Any]:
        return [self._get(key) for key in keys]

    def _set(self, key: bytes, value: bytes, *options: bytes) -> Any:
        if b"NX" in options and self._find(key) is not None:
            return None
        self._drop(key)
        self._values[key] = value
        if b"PX" in options:
            self._ends_ms[key] = self._now_ms() + int(options[options.index(b"PX") + 1])
        return Status(b"OK")

    def _del(self, *keys: bytes) -> int:
        return sum(self._find(key) is not None and self._drop(key) for key in keys)

    def _exists(self, key: bytes) -> int:
        return int(self._find(key) is not None)

    def _hget(self, key: bytes, field: bytes) -> Any:
        return (self._find(key) or {}).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[Any]:
        found = self._find(key) or {}
        return [found.get(field) for field in fields]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in (self._find(key) or {}).items() for part in pair]

    def _hkeys(self, key: bytes) -> list[bytes]:
        return list(self._find(key) or {})

    def _hset(self, key: bytes, *parts: bytes) -> int:
        values = self._made(key, dict)
        before = len(values)
        values.update(zip(parts[::2], parts[1::2], strict=True))
        return len(values) - before

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        values = self._find(key) or {}
        count = sum(values.pop(field, None) is not None for field in fields)
        self._shrunk(key)
        return count

    def _hexists(self, key: bytes, field: bytes) -> int:
        return int(field in (self._find(key) or {}))

    def _hstrlen(self, key: bytes, field: bytes) -> int:
        return len((self._find(key) or {}).get(field, b""))

    def _hincrby(self, key: bytes, field: bytes, amount: bytes) -> int:
        values = self._made(key, dict)
        values[field] = b"%d" % (int(values.get(field, b"0")) + int(amount))
        return int(values[field])

    def _pexpire(self, key: bytes, milliseconds: bytes) -> int:
        return self._pexpireat(key, b"%d" % (self._now_ms() + int(milliseconds)))

    def _pexpireat(self, key: bytes, end_ms: bytes) -> int:
        if self._find(key) is None:
            return 0
        self._ends_ms[key] = int(end_ms)
        return 1

    def _pttl(self, key: bytes) -> int:
        if self._find(key) is None:
            return -2
        return self._ends_ms[key] - self._now_ms() if key in self._ends_ms else -1

    def _zadd(self, key: bytes, score: bytes, member: bytes) -> int:
        values = self._made(key, dict)
        is_new = member not in values
        values[member] = float(score)
        return int(is_new)

    def _zrem(self, key: bytes, member: bytes) -> int:
        return self._hdel(key, member)

    def _zcard(self, key: bytes) -> int:
        return len(self._find(key) or {})

    def _zcount(self, key: bytes, least: bytes, most: bytes) -> int:
        return sum(float(least) <= score <= float(most) for score in (self._find(key) or {}).values())

    def _zrangebyscore(self, key: bytes, least: bytes, most: bytes, *limit: bytes) -> list[bytes]:
        scores = self._find(key) or {}
        bound = float(most.removeprefix(b"("))
        found = sorted(
            (score, member)
            for member, score in scores.items()
            if float(least) <= score <= bound and not (score == bound and most.startswith(b"("))
        )
        first, count = map(int, limit[1:] or (0, -1))
        return [member for _, member in found[first:][: count if count >= 0 else None]]

    def _zscore(self, key: bytes, member: bytes) -> Any:
        score = (self._find(key) or {}).get(member)
        return None if score is None else b"%.17g" % score

    def _zremrangebyscore(self, key: bytes, least: bytes, most: bytes) -> int:
        values = self._find(key) or {}
        gone = [member for member, score in values.items() if float(least) <= score <= float(most)]
        return self._hdel(key, *gone) if gone else 0

    def _xadd(self, key: bytes, *parts: bytes) -> bytes:
        entries = self._made(key, list)
        now_ms = self._now_ms()
        last_ms, number = entries[-1][0] if entries else (0, 0)
        entries.append(((now_ms, 0) if now_ms > last_ms else (last_ms, number + 1), parts[parts.index(b"*") + 1 :]))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return b"%d-%d" % entries[-1][0]

    def _xrange(self, key: bytes, first: bytes, _last: bytes) -> list[Any]:
        entries = self._find(key) or []
        return [[b"%d-%d" % name, list(fields)] for name, fields in entries if name >= _entry_id(first)]

    def _xrevrange(self, key: bytes, *_range: bytes) -> list[Any]:
        entries = self._find(key) or []
        return [[b"%d-%d" % name, list(fields)] for name, fields in entries[-1:]]

    def _sadd(self, key: bytes, member: bytes) -> int:
        return self._zadd(key, b"0", member)

    def _srem(self, key: bytes, member: bytes) -> int:
        return self._hdel(key, member)

    def _smembers(self, key: bytes) -> list[bytes]:
        return list(self._find(key) or {})


class SimulatedStore(Store):
    """The router's store, with its time-outs and its breaker, on a Redis that is simulated."""

    def __init__(self, redis: SimulatedRedis, timeout_s: float, metrics: RouterMetrics) -> None:
        self._redis = redis
        super().__init__("redis://simulated", timeout_s, metrics)

    def _connect(self, url: str, answer_s: float | None, retry: Retry) -> Redis:
        return cast(Redis, _Client(self._redis, answer_s, retry.get_retries()))


class _Client:
    """The part of redis-py's client that the store uses."""

    def __init__(self, redis: SimulatedRedis, timeout_s: float | None, num_retries: int) -> None:
        self._redis = redis
        self._timeout_s = timeout_s
        self._num_retries = num_retries

    async def ping(self) -> None:
        await self._ask(lambda: None)

    async def sadd(self, key: str, member: str) -> None:
        await self._ask(lambda: self._redis.command(b"SADD", key.encode(), member.encode()))

    async def srem(self, key: str, member: str) -> None:
        await self._ask(lambda: self._redis.command(b"SREM", key.encode(), member.encode()))

    async def smembers(self, key: str) -> set[bytes]:
        return set(await self._ask(lambda: self._redis.command(b"SMEMBERS", key.encode())))

    async def set(self, key: str, value: int, px: int) -> None:
        await self._ask(lambda: self._redis.command(b"SET", key.encode(), b"%d" % value, b"PX", b"%d" % px))

    async def xread(self, streams: dict[str, str], block: int) -> None:
        ((key, last),) = streams.items()
        await self._redis.wait_for_entry(key.encode(), last.encode(), block / 1000)

    def register_script(self, text: str) -> Callable[..., Awaitable[Any]]:
        async def run(keys: list[str], args: tuple[str | bytes | int, ...]) -> Any:
            given = [each if isinstance(each, bytes) else str(each).encode() for each in args]
            return await self._ask(lambda: self._redis.run(text, [key.encode() for key in keys], given))

        return run

    @property
    def connection_pool(self) -> "_Client":
        return self

    async def update_active_connections_for_reconnect(self) -> None:
        pass

    async def disconnect(self, inuse_connections: bool) -> None:
        pass

    async def aclose(self, close_connection_pool: bool) -> None:
        pass

    async def _ask(self, work: Callable[[], Any]) -> Any:
        return await self._redis.ask(work, self._timeout_s, self._num_retries)


_NEEDS_MEMORY: Final = frozenset((b"SET", b"HSET", b"HINCRBY", b"ZADD", b"XADD", b"SADD"))


def _entry_id(text: bytes) -> tuple[int, int]:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise exceptions.ResponseError("Lua redis lib command arguments must be strings or integers")
    return b"%.17g" % value
