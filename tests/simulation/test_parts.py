"""The parts of the simulation: time, Lua, Redis and the toy model."""

import asyncio
from typing import Any

import numpy as np
import pytest
from lupa.lua51 import LuaError
from redis.exceptions import ResponseError

from corolla.decoding.parameters import SamplingParams
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Process, Stuck, VirtualLoop
from tests.simulation.scenario import draw
from tests.simulation.store import SimulatedRedis
from tests.simulation.toy_model import ToyModel


def in_virtual_time(work: Any) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


def test_time_jumps_and_a_job_of_a_thread_takes_its_time() -> None:
    async def work(loop: VirtualLoop) -> None:
        began_s = loop.time()
        await asyncio.sleep(3600)
        process = Process(loop, "p", lambda: 5.0)

        async def compute() -> int:
            return await loop.run_in_executor(None, lambda: 7)

        assert await process.start(compute()) == 7
        assert loop.time() == pytest.approx(began_s + 3605)

    in_virtual_time(work)


def test_a_frozen_process_goes_on_where_it_was_and_a_dead_one_never() -> None:
    async def work(loop: VirtualLoop) -> None:
        ticks: dict[str, list[float]] = {"one": [], "other": []}

        async def tick(name: str) -> None:
            while True:
                ticks[name].append(loop.time())
                await asyncio.sleep(1.0)

        one, other = Process(loop, "one"), Process(loop, "other")
        one.keep_up(tick("one"))
        other.keep_up(tick("other"))
        await asyncio.sleep(1.5)
        one.freeze()
        other.kill()
        await asyncio.sleep(5.0)
        assert [len(each) for each in ticks.values()] == [2, 2]
        one.resume()
        other.resume()
        await asyncio.sleep(0.1)
        assert [len(each) for each in ticks.values()] == [3, 2]
        for process in (one, other):
            process.dissolve()
        await asyncio.sleep(0)

    in_virtual_time(work)


def test_a_loop_without_work_raises_and_does_not_hang() -> None:
    async def work(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stuck):
        in_virtual_time(work)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("return ARGV[1] .. 1.5 .. #KEYS", b"b1.51"),
        ("return {1, 'a', false, 2.9, nil, 3}", [1, b"a", None, 2]),
        ("return {true, {ok = 'fine'}}", [1, b"fine"]),
        ("return redis.call('HMGET', KEYS[1], 'here', 'not')", [b"\xff", None]),
        ("return redis.call('HGET', KEYS[1], 'not') == false", 1),
        ("return redis.call('SET', KEYS[1], 'other').ok", b"OK"),
        ("return string.sub(redis.pcall('ZADD', KEYS[1], 1, 'a').err, 1, 3)", b"OOM"),
    ],
)
def test_a_script_sees_values_as_redis_gives_them(text: str, expected: Any) -> None:
    async def work(loop: VirtualLoop) -> None:
        redis = SimulatedRedis(loop)
        redis.command(b"HSET", b"key", b"here", b"\xff")
        redis.is_full = "pcall" in text
        assert redis.run(text, [b"key"], [b"b"]) == expected

    in_virtual_time(work)


@pytest.mark.parametrize(
    "text",
    ["x = 1", "return unknown", "return os.time()", "return cjson", "return {err = 'refused'}", "return ~1",
     "redis.call('SADD', KEYS[1], false)"],
)  # fmt: skip
def test_what_redis_refuses_of_a_script_is_refused(text: str) -> None:
    async def work(loop: VirtualLoop) -> None:
        with pytest.raises((LuaError, ResponseError)):
            SimulatedRedis(loop).run(text, [b"key"], [])

    in_virtual_time(work)


def test_keys_end_when_their_time_has_come() -> None:
    async def work(loop: VirtualLoop) -> None:
        redis = SimulatedRedis(loop)
        redis.command(b"SET", b"k", b"v", b"PX", 1500)
        await asyncio.sleep(1.4)
        assert redis.command(b"GET", b"k") == b"v"
        assert redis.command(b"PTTL", b"k") == 100
        await asyncio.sleep(0.2)
        assert redis.command(b"GET", b"k") is None

    in_virtual_time(work)


def test_a_toy_token_depends_on_every_token_before_it() -> None:
    model = ToyModel((None, 6, None))
    prompt = list(range(12))
    answer = model.answer(prompt, 8, SamplingParams(), ignores_eos=True)
    for place in range(len(prompt)):
        other = [*prompt]
        other[place] = (other[place] + 1) % model.vocab_size
        assert model.answer(other, 8, SamplingParams(), ignores_eos=True) != answer
    assert model.answer([*prompt[1:], prompt[0]], 8, SamplingParams(), ignores_eos=True) != answer
    assert len(np.unique(model.logits(np.array([5]))[0])) == model.vocab_size


def test_what_is_killed_twice_starts_again_once() -> None:
    """Two processes at one address would each have half of what is sent there."""

    async def work(loop: VirtualLoop) -> None:
        cluster = Cluster(loop, draw(0))
        num_processes = len(cluster.processes)
        for services, restart in (
            (cluster.servers, cluster.restart_server),
            (cluster.routers, cluster.restart_router),
            (cluster.clients, cluster.restart_client),
        ):
            for _ in range(2):
                cluster.network.kill(services[0].process)
            for _ in range(2):
                restart(0)
        assert sum(not process.is_dead for process in cluster.processes) == num_processes
        await cluster.dissolve()

    in_virtual_time(work)
