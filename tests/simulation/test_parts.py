"""The parts of the simulation: time, Lua, Redis and the toy model."""

import asyncio
from typing import Any

import numpy as np
import pytest

from corolla.decoding.parameters import SamplingParams
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Process, Stuck, VirtualLoop
from tests.simulation.lua import compile_script
from tests.simulation.scenario import draw
from tests.simulation.store import SimulatedRedis
from tests.simulation.toy_model import ToyModel


def in_virtual_time(work: Any) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


def lua(text: str, *arguments: bytes) -> Any:
    return compile_script(text)([b"key"], list(arguments), lambda *parts: parts)


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
        ("return 1 + 2 * 3 - 4 / 2", 5),
        ("return 'a' .. 1 .. 'b'", b"a1b"),
        ("return '10' + 5", 15),
        ("return 0 and 'zero is true'", b"zero is true"),
        ("return nil or false", False),
        ("return not nil == true", True),
        ("return 1 == '1'", False),
        ("local t = {'a', 'b'} t[#t + 1] = 'c' return t[3] .. #t", b"c3"),
        ("local s = '' for i = 1, 5, 2 do s = s .. i end return s", b"135"),
        ("local s = '' for _, v in ipairs({'x', 'y'}) do s = s .. v end return s", b"xy"),
        ("local function f(a, b) if b then return a end return 'none' end return f('x') .. f('y', 1)", b"noney"),
        ("if ARGV[1] == 'a' then return 1 elseif ARGV[1] == 'b' then return 2 else return 3 end", 2),
        ("return string.sub('hello', 2, -2)", b"ell"),
        ("return string.find('a.b', '.', 1, true)", 2),
        ("return string.format('%06d', 42) .. string.format('%.0f', 1.6)", b"0000422"),
        ("local a, b = 1 return type(b) .. type(a)", b"nilnumber"),
        ("return string.match('turn.7', '^[^.]*')", b"turn"),
        ("return tonumber('x') == nil -- a comment", True),
    ],
)
def test_the_lua_interpreter_agrees_with_lua(text: str, expected: Any) -> None:
    assert lua(text, b"b") == expected


@pytest.mark.parametrize("text", ["return function() end", "while true do end", "return ~1", "return 'a'"[:-1]])
def test_unsupported_lua_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        lua(text)


def test_keys_end_when_their_time_has_come() -> None:
    async def work(loop: VirtualLoop) -> None:
        redis = SimulatedRedis(loop)
        redis.command(b"SET", b"k", b"v", b"PX", 1500)
        await asyncio.sleep(1.4)
        assert redis.command(b"GET", b"k") == b"v"
        assert redis.command(b"PTTL", b"k") == 100
        await asyncio.sleep(0.2)
        assert redis.command(b"GET", b"k") is False

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
