"""One process of stacks for all tests of the library face."""

from collections.abc import Iterator

import pytest

from tests.integration.hf.stacks import Stacks


@pytest.fixture(scope="session")
def stacks() -> Iterator[Stacks]:
    with Stacks() as running:
        yield running
