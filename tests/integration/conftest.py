"""Integration tests use a real Redis, and most of them one tiny model."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
import pytest_asyncio

from corolla.sdk.async_client import AsyncClient
from tests.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    # Tests of the router need no torch.
    from tests.integration.swarm import Swarm


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Redis for all tests of a run, on a free port; tests keep apart by the names of their models."""
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    try:
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for answers that last until they are disturbed. No test changes its files."""
    from tests.checkpoints import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint("llama", folder, config_changes={"max_position_embeddings": 16384})


@pytest_asyncio.fixture(loop_scope="module")
async def clients(swarm: "Swarm") -> AsyncIterator[list[AsyncClient]]:
    """One client of each of two client services."""
    async with swarm.connect(0) as first, swarm.connect(1) as second:
        yield [first, second]
    await swarm.until_empty()


@pytest_asyncio.fixture(loop_scope="module")
async def http(swarm: "Swarm") -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=swarm.url, timeout=60) as http:
        yield http
