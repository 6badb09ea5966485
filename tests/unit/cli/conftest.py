from collections.abc import Iterator

import pytest

from tests.generation_server import GenerationServer


@pytest.fixture
def server() -> Iterator[GenerationServer]:
    with GenerationServer() as running:
        yield running
