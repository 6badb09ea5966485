"""What unit tests of several rooms share."""

from collections.abc import Callable, Iterator

import pytest

from corolla.chassis import failpoints


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    """Arms a failpoint of this process, such as `fail:engine:4`, until the test ends."""
    yield lambda given: failpoints.arm({failpoints.VARIABLE: given})
    failpoints.arm({})
