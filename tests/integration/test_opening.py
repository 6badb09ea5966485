"""Hops on which a session cannot be opened: they are left out, and nothing of it stays there."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corolla.block_server.service import BlockServer
from corolla.chassis.errors import NoChain
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import sample
from tests.integration.swarm import Swarm

PROMPT = "the thin man"
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint("llama", tmp_path_factory.mktemp("opening") / "tiny")


@contextmanager
def stuck(server: BlockServer) -> Iterator[None]:
    """Its thread that computes does not come back, as of a device that hangs; its event loop answers."""
    engine, released = server._engine, threading.Event()
    assert engine is not None
    copying = asyncio.ensure_future(engine.copies.make(released.wait))
    try:
        yield
    finally:
        released.set()
        copying.cancel()


async def test_a_server_that_lives_and_opens_nothing_is_avoided(tmp_path: Path, model: Path) -> None:
    # The planner would rather stay in one zone.
    settings: dict[str, Any] = {"server": {"zone": "here"}, "client": {"open_timeout_s": 0.5}}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], **settings) as swarm:
        await swarm.add_server("2:5", zone="there")
        preferred = swarm.servers[1]
        async with swarm.connect() as client:
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            with stuck(preferred):
                started_s = time.monotonic()
                async with asyncio.timeout(10):
                    assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                    first_s = time.monotonic() - started_s
                    assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected
                assert first_s > 0.5, "the preferred server was not asked"
                assert time.monotonic() - started_s - first_s < 0.5, "the second answer waited for it, too"
        # What it opens too late is closed again.
        await swarm.until_empty()


async def test_a_server_that_failed_lately_is_the_last_resort(tmp_path: Path, model: Path) -> None:
    server = {"prefix_cache": False}
    async with Swarm(tmp_path, model, ["0:2", "2:5"], server=server) as swarm, swarm.connect() as client:
        async with client.session() as session:
            await session.generate(PROMPT, **OPTIONS)
            avoid(swarm, swarm.servers[1])
            expected = (await client.generate(PROMPT, **OPTIONS)).token_ids
            # A conversation finds there what it left.
            assert (await session.generate(PROMPT, **OPTIONS)).usage.cached_tokens > 0
        await swarm.router.stop()
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected


async def test_who_has_another_chain_leaves_a_server_out_that_failed_lately(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"]) as swarm, swarm.connect() as client:
        failed = swarm.servers[1]
        avoid(swarm, failed)
        for _ in range(8):
            await client.generate(PROMPT, **OPTIONS)
        assert await sample(failed.metrics_port, "corolla_hop_tokens_total") == 0


async def test_a_server_that_failed_this_very_request_is_not_asked_again(tmp_path: Path, model: Path) -> None:
    async with Swarm(tmp_path, model, ["0:2", "2:5"], client={"open_timeout_s": 0.3}) as swarm:
        async with swarm.connect() as client:
            with stuck(swarm.servers[1]):
                started_s = time.monotonic()
                with pytest.raises(NoChain):
                    await client.generate(PROMPT, **OPTIONS)
                assert 0.3 < time.monotonic() - started_s < 0.6, "asked just once"
            # It is well again, and nobody need wait until that is known.
            await client.generate(PROMPT, **OPTIONS)
        await swarm.until_empty()


def avoid(swarm: Swarm, server: BlockServer) -> None:
    """The client service has just seen it fail."""
    routes = swarm.clients[0]._routes
    assert routes is not None
    routes.avoid(server.server_id)


@pytest.mark.parametrize("is_router_there", [True, False], ids=["by the router", "by the client service"])
async def test_a_burst_is_shared_by_replicas_before_they_tell_of_it(
    tmp_path: Path, model: Path, is_router_there: bool
) -> None:
    # No heartbeat comes meanwhile, and what one text leaves behind helps no other.
    settings: dict[str, Any] = {
        "router": {"lease_ms": 600_000, "heartbeat_interval_ms": 200_000},
        "server": {"prefix_cache": False},
    }
    async with Swarm(tmp_path, model, ["0:2", "2:5", "2:5"], **settings) as swarm, swarm.connect() as client:
        if not is_router_there:
            await swarm.router.stop()
        await asyncio.gather(*(client.generate(PROMPT, **OPTIONS) for _ in range(64)))
        tokens = [await sample(server.metrics_port, "corolla_hop_tokens_total") for server in swarm.servers]
        assert tokens[1] + tokens[2] == tokens[0]
        # They measured themselves, so they are not quite equal.
        assert 0.25 < tokens[1] / tokens[0] < 0.75
