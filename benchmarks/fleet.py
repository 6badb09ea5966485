"""A fleet of simulated block servers over a real router and Redis: joins, plans, how sessions spread, and deaths.

    python -m benchmarks.fleet --servers 10 100 1000

The servers register, send heartbeats and open sessions; they compute nothing. A model of 80 blocks is served in spans
of 10, so a chain has 8 hops. Where sessions are only planned, client services are their planner alone, with the
placement that the router pushes: each with a connection of its own. Where servers die, client services open all
sessions, and open those of the dead servers again, as they do for answers.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.command import run
from benchmarks.figures import Figure, at_least, at_most, figure
from benchmarks.fleet_servers import LEASE_MS, NUM_BLOCKS, PATIENCE_S, Server, join_all
from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.routes import Routes
from corolla.chassis.errors import CorollaError
from corolla.local.ports import Ports
from corolla.v1 import common_pb2
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis

Pipe = TypeVar("Pipe", asyncio.StreamReader, asyncio.StreamWriter)

_PLANS_AT_ONCE: Final = 40
_NUM_PLANS: Final = 100
_SESSION_TOKENS: Final = 256
_LEASE_MS: Final = 600_000
_NUM_ROUTERS: Final = 2
_NUM_HOLDERS: Final = 4
_READY_S: Final = 30.0
_MOST_LINE_BYTES: Final = 1 << 24


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--clients", type=int, default=16, help="client services that place sessions at once")
    parser.add_argument("--sessions", type=int, default=64, help="that each of them places within one heartbeat")
    parser.add_argument("--deaths", type=int, default=100, help="servers of the largest fleet that die at once")
    parser.add_argument("--held", type=int, default=10_000, help="sessions that the fleet holds then")
    parser.add_argument("--services", type=int, default=4, help="client services that hold them")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis.start(Path(folder))
        try:
            for count in options.servers:
                yield from asyncio.run(_fleet(f"redis://127.0.0.1:{redis.port}/0", count, options))
            if options.deaths:
                yield from asyncio.run(_deaths(f"redis://127.0.0.1:{redis.port}/0", max(options.servers), options))
        finally:
            redis.stop()


async def _fleet(redis_url: str, count: int, options: argparse.Namespace) -> list[Figure]:
    found: list[Figure] = []
    async with _router(redis_url) as address:
        model = f"fleet-{count}"
        control = ControlPlane(address, model)
        servers = [Server(control, model, f"host-{number}:1") for number in range(count)]
        began_s = time.perf_counter()
        await join_all(servers)
        found.append(figure(f"{count} servers join", "s", [time.perf_counter() - began_s]))

        async def by_router() -> None:
            await control.plan_chain(Server.fingerprint, 0, frozenset())

        found += [
            *await _plans("router", count, by_router, (5.0, 200.0)),
            *await _refused(control, count),
        ]
        async with _client_services(address, model, options.clients) as (clients, watch):
            found += await _spreads(clients, count, options.sessions)

            async def by_client() -> None:
                await clients[0].plan(num_tokens=0)

            async def after_a_push() -> None:
                watch.take(_push_of_one(watch))
                await clients[0].plan(num_tokens=0)

            found += await _plans("client service", count, by_client, (1.0, 1000.0))
            found += await _plans(
                "client service, to which one server's load was pushed", count, after_a_push, (5.0, 200.0)
            )
        await control.close()
    return found


async def _deaths(redis_url: str, count: int, options: argparse.Namespace) -> list[Figure]:
    """Many servers die at once, of a fleet that sends heartbeats. Each client service is a process of its own."""
    model = f"deaths-{count}"
    async with AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(_router(redis_url, LEASE_MS)) for _ in range(_NUM_ROUTERS)]
        sizes = (count - options.deaths, options.deaths)
        living, dying = [await _started(stack, "fleet_servers", model, str(size), *routers) for size in sizes]
        await _line(living)
        dead = await _line(dying)
        held = str(options.held // options.services)
        services = [
            await _started(stack, "fleet_client", routers[number % _NUM_ROUTERS], model, held)
            for number in range(options.services)
        ]
        for each in services:
            _pipe(each.stdin).write(dead)
        for each in services:
            await _line(each)
        dying.kill()
        died = time.time()
        found = [json.loads(await _line(each)) for each in services]
    name = f"{options.deaths} of {count} servers die with {options.held} sessions"
    return [
        figure(f"{name}: all open again", "s", [max(each["ended"] for each in found) - died], at_most(10.0)),
        figure(f"{name}: sessions opened again", "", [sum(each["num_opened"] for each in found)]),
        figure(f"{name}: longest stall of a client service", "s", [max(each["stall_s"] for each in found)],
               at_most(0.2)),
        figure(f"{name}: its work in such a time", "s", [max(each["work_s"] for each in found)]),
    ]  # fmt: skip


async def _started(stack: AsyncExitStack, module: str, *arguments: str) -> asyncio.subprocess.Process:
    """A process of this benchmark, which ends with the context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.{module}", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_MOST_LINE_BYTES,
    )  # fmt: skip
    stack.callback(_end, process)
    return process


def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _pipe(pipe: Pipe | None) -> Pipe:
    if pipe is None:
        raise RuntimeError("the process has no pipe")
    return pipe


async def _line(process: asyncio.subprocess.Process) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        line = await _pipe(process.stdout).readline()
    if not line:
        raise RuntimeError("a process ended")
    return line


async def _plans(
    who: str, count: int, plan: Callable[[], Awaitable[None]], targets: tuple[float, float]
) -> list[Figure]:
    """Plans one after another."""
    took_ms: list[float] = []
    for _ in range(_NUM_PLANS):
        began_s = time.perf_counter()
        await plan()
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    most_ms, least_per_s = targets
    per_s = 1e3 / statistics.median(took_ms)
    return [
        figure(f"{count} servers: a plan of a {who}", "ms", took_ms, at_most(most_ms)),
        figure(f"{count} servers: plans of a {who}, one after another", "1/s", [per_s], at_least(least_per_s)),
    ]


def _push_of_one(watch: PlacementWatch) -> pb.Placement:
    """What a router pushes when the load of one server is another one."""
    before = random.choice(watch.servers)
    now = pb.PlacedServer(server=pb.ServerDescription(server_id=before.server.server_id), state=before.state)
    now.load.CopyFrom(before.load)
    now.load.num_sessions += 1
    return pb.Placement(servers=[now], cheapest_chain=common_pb2.Chain(), change=pb.PlacementChange(same_adapters=True))


async def _refused(control: ControlPlane, count: int) -> list[Figure]:
    """Plans of the router that are asked for at once."""
    calls = (control.plan_chain(Server.fingerprint, 0, frozenset()) for _ in range(_PLANS_AT_ONCE))
    replies = await asyncio.gather(*calls, return_exceptions=True)
    num_refused = sum(isinstance(each, CorollaError) for each in replies)
    return [figure(f"{count} servers: of {_PLANS_AT_ONCE} plans at once, refused", "", [num_refused], at_most(0))]


async def _spreads(clients: list[Routes], count: int, num_sessions: int) -> list[Figure]:
    """The sessions of the fullest server over the mean, when all clients place theirs between two heartbeats."""
    opened: Counter[str] = Counter()
    stood_by: Counter[str] = Counter()
    followed: Counter[str] = Counter()

    async def place(routes: Routes) -> None:
        own: Counter[str] = Counter()
        for _ in range(num_sessions):
            chain = await routes.plan(num_tokens=_SESSION_TOKENS)
            opened.update(hop.server_id for hop in chain.hops)
            taken = {hop.server_id for hop in chain.hops}
            for hop in chain.hops:
                standby = routes.standby_for(hop, taken, _SESSION_TOKENS, own)
                if standby is not None:
                    own[standby.server_id] += 1
                    taken.add(standby.server_id)
            await asyncio.sleep(0)
        stood_by.update(own)

    async def follow(routes: Routes, held: Mapping[str, int]) -> None:
        for _ in range(num_sessions):
            chain = await routes.plan(num_tokens=_SESSION_TOKENS, held=held, may_fetch=True)
            followed.update(hop.server_id for hop in chain.hops)
            await asyncio.sleep(0)

    await asyncio.gather(*map(place, clients))
    chains = [await clients[0].plan(num_tokens=0) for _ in range(_NUM_HOLDERS)]
    held = {hop.server_id: _SESSION_TOKENS // 2 for chain in chains for hop in chain.hops}
    await asyncio.gather(*(follow(routes, held) for routes in clients))
    name = f"{count} servers, fullest / mean, {len(clients)} clients with {num_sessions} sessions each"
    spreads = [
        figure(f"{name}: {what}", "x", [max(sessions.values()) / (sum(sessions.values()) / among)], at_most(1.3))
        for what, sessions, among in (
            ("sessions", opened, count),
            ("standbys", stood_by, count),
            ("that follow one beginning, of its holders", followed, len(held)),
        )
        if sessions
    ]
    return spreads


@asynccontextmanager
async def _router(redis_url: str, lease_ms: int = _LEASE_MS) -> AsyncIterator[str]:
    """A router as a process of its own. Yields its address."""
    ports = Ports()
    port, metrics_port = ports.free(), ports.free()
    environment = {
        **os.environ,
        "COROLLA_REDIS_URL": redis_url,
        "COROLLA_HOST": "127.0.0.1",
        "COROLLA_PORT": str(port),
        "COROLLA_METRICS_PORT": str(metrics_port),
        "COROLLA_LEASE_MS": str(lease_ms),
        "COROLLA_REBALANCE": "false",
        # Redis is late on a busy machine, and not away.
        "COROLLA_REDIS_TIMEOUT_MS": "5000",
    }
    ports.close()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "corolla.router", env=environment, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await _until_answers(f"127.0.0.1:{port}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def _until_answers(address: str) -> None:
    control = ControlPlane(address, "nothing")
    give_up_s = time.perf_counter() + _READY_S
    try:
        while True:
            try:
                await control.get_placement()
                return
            except CorollaError:
                if time.perf_counter() > give_up_s:
                    raise
            await asyncio.sleep(0.1)
    finally:
        await control.close()


@asynccontextmanager
async def _client_services(address: str, model: str, count: int) -> AsyncIterator[tuple[list[Routes], PlacementWatch]]:
    """The planners of client services, once each has a placement, and the watch of the first one."""
    controls = [ControlPlane(address, model) for _ in range(count)]
    watches = [PlacementWatch(control) for control in controls]
    running = [asyncio.create_task(watch.run()) for watch in watches]
    try:
        for watch in watches:
            async with asyncio.timeout(PATIENCE_S):
                while not watch.servers:
                    await watch.wait_for_update(1.0)
        routes = [
            Routes(control, watch, Server.fingerprint, NUM_BLOCKS)
            for control, watch in zip(controls, watches, strict=True)
        ]
        yield routes, watches[0]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for control in controls:
            await control.close()


if __name__ == "__main__":
    run(__doc__, add_options, measure)
