"""A fleet of simulated block servers over a real router and Redis: joins, plans, and how evenly sessions are spread.

    python -m benchmarks.fleet --servers 10 100 1000

The servers register, send heartbeats and count the sessions that plans give them; they compute nothing. A model of 80
blocks is served in spans of 10, so a chain has 8 hops. Client services are their planner alone, with the placement that
the router pushes: each with a connection of its own.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from benchmarks.command import run
from benchmarks.figures import Figure, at_least, at_most, figure
from corolla.chain.control import ControlPlane
from corolla.chain.placement import PlacementWatch
from corolla.chain.routes import Routes
from corolla.chassis.errors import CorollaError
from corolla.local.ports import Ports
from corolla.v1 import router_pb2 as pb
from tests.embedded_redis import EmbeddedRedis

_NUM_BLOCKS: Final = 80
_BLOCKS_OF_A_SERVER: Final = 10
_NUM_PAGES: Final = 4096
_JOINS_AT_ONCE: Final = 20
_PLANS_AT_ONCE: Final = 40
_NUM_PLANS: Final = 100
_SESSION_TOKENS: Final = 256
_LEASE_MS: Final = 600_000
_READY_S: Final = 30.0
_PATIENCE_S: Final = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--clients", type=int, default=16, help="client services that place sessions at once")
    parser.add_argument("--sessions", type=int, default=64, help="that each of them places within one heartbeat")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis.start(Path(folder))
        try:
            for count in options.servers:
                yield from asyncio.run(_fleet(f"redis://127.0.0.1:{redis.port}/0", count, options))
        finally:
            redis.stop()


async def _fleet(redis_url: str, count: int, options: argparse.Namespace) -> list[Figure]:
    found: list[Figure] = []
    async with _router(redis_url) as address:
        model = f"fleet-{count}"
        control = ControlPlane(address, model)
        servers = [_Server(control, model) for _ in range(count)]
        began_s = time.perf_counter()
        for first in range(0, count, _JOINS_AT_ONCE):
            await asyncio.gather(*(each.join() for each in servers[first : first + _JOINS_AT_ONCE]))
        found.append(figure(f"{count} servers join", "s", [time.perf_counter() - began_s]))

        async def by_router() -> None:
            await control.plan_chain(fingerprint=_Server.fingerprint, num_tokens=0)

        found += [
            *await _plans("router", count, by_router, (5.0, 200.0)),
            *await _refused(control, count),
        ]
        async with _client_services(address, model, options.clients) as clients:

            async def by_client() -> None:
                await clients[0].plan(num_tokens=0, record_id="", blocks=None)

            found += await _plans("client service", count, by_client, (1.0, 1000.0))
            found.append(await _spread(clients, count, options.sessions))
        await control.close()
    return found


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


async def _refused(control: ControlPlane, count: int) -> list[Figure]:
    """Plans of the router that are asked for at once."""
    calls = (control.plan_chain(fingerprint=_Server.fingerprint, num_tokens=0) for _ in range(_PLANS_AT_ONCE))
    replies = await asyncio.gather(*calls, return_exceptions=True)
    num_refused = sum(isinstance(each, CorollaError) for each in replies)
    return [figure(f"{count} servers: of {_PLANS_AT_ONCE} plans at once, refused", "", [num_refused], at_most(0))]


async def _spread(clients: list[Routes], count: int, num_sessions: int) -> Figure:
    """The sessions of the fullest server over the mean, when all clients place theirs between two heartbeats."""
    sessions: Counter[str] = Counter()

    async def place(routes: Routes) -> None:
        for _ in range(num_sessions):
            chain = await routes.plan(num_tokens=_SESSION_TOKENS, record_id="", blocks=None)
            sessions.update(hop.server_id for hop in chain.hops)

    await asyncio.gather(*map(place, clients))
    most, mean = max(sessions.values()), sum(sessions.values()) / count
    name = f"{count} servers: sessions of the fullest / mean, {len(clients)} clients with {num_sessions} each"
    return figure(name, "x", [most / mean], at_most(1.3))


@asynccontextmanager
async def _router(redis_url: str) -> AsyncIterator[str]:
    """A router as a process of its own. Yields its address."""
    ports = Ports()
    port, metrics_port = ports.free(), ports.free()
    environment = {
        **os.environ,
        "COROLLA_REDIS_URL": redis_url,
        "COROLLA_HOST": "127.0.0.1",
        "COROLLA_PORT": str(port),
        "COROLLA_METRICS_PORT": str(metrics_port),
        "COROLLA_LEASE_MS": str(_LEASE_MS),
        "COROLLA_REBALANCE": "false",
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
async def _client_services(address: str, model: str, count: int) -> AsyncIterator[list[Routes]]:
    """The planners of client services, once each has a placement."""
    controls = [ControlPlane(address, model) for _ in range(count)]
    watches = [PlacementWatch(control) for control in controls]
    running = [asyncio.create_task(watch.run()) for watch in watches]
    try:
        for watch in watches:
            async with asyncio.timeout(_PATIENCE_S):
                while not watch.servers:
                    await watch.wait_for_update(1.0)
        yield [
            Routes(control, watch, _Server.fingerprint, _NUM_BLOCKS)
            for control, watch in zip(controls, watches, strict=True)
        ]
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for control in controls:
            await control.close()


@dataclass(slots=True)
class _Server:
    """A block server as the router sees it."""

    fingerprint: ClassVar[str] = "f"

    control: ControlPlane
    model: str
    server_id: str = field(default_factory=lambda: secrets.token_hex(16))

    async def join(self) -> None:
        description = pb.ServerDescription(
            server_id=self.server_id, address=f"{self.server_id[:12]}:1", model=self.model,
            fingerprint=self.fingerprint, num_model_blocks=_NUM_BLOCKS, capacity_blocks=_BLOCKS_OF_A_SERVER,
            decode_tokens_per_second=1000.0,
        )  # fmt: skip
        stub: Any = self.control.stub
        await stub.RegisterServer(pb.RegisterServerRequest(server=description), timeout=_PATIENCE_S)
        load = pb.ServerLoad(num_pages=_NUM_PAGES, num_free_pages=_NUM_PAGES, max_session_tokens=_NUM_PAGES << 4)
        beat = pb.HeartbeatRequest(model=self.model, server_id=self.server_id, state=pb.SERVER_STATE_READY, load=load)
        await stub.Heartbeat(beat, timeout=_PATIENCE_S)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
