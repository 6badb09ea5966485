"""Integration tests use a real Redis, and most of them one tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_tiny_checkpoint
from tests.embedded_redis import EmbeddedRedis


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
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint("llama", folder, config_changes={"max_position_embeddings": 16384})
