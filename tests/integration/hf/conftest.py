"""One process of stacks for all tests of the library face."""

from collections.abc import Iterator

import pytest

from tests.integration.hf.stacks import Stacks


@pytest.fixture(scope="session")
def process_of_stacks() -> Iterator[Stacks]:
    with Stacks() as running:
        yield running


@pytest.fixture(scope="module")
def stacks(process_of_stacks: Stacks) -> Iterator[Stacks]:
    """Ends the stacks of a module with it."""
    yield process_of_stacks
    process_of_stacks.end()
