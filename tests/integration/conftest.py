"""Integration tests use a real Redis."""

from collections.abc import Iterator

import pytest

from tests.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One Redis for all tests of a run, on a free port; tests keep apart by the names of their models."""
    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    try:
        yield server.url
    finally:
        server.stop()
