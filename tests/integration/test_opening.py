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
from tests.checkpoints import make_tiny_checkpoint
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
