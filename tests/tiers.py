"""Which cases of a parametrised test `make test` runs; `make test-all` runs every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values as parameters; all but those in `kept` run in `make test-all` only.

    Raises:
        ValueError: `kept` has what is not among the values, so that a renamed case does not leave `make test` silently.
    """
    cases = list(values)
    if unknown := [each for each in kept if each not in cases]:
        raise ValueError(f"no such cases: {unknown}")
    return [each if each in kept else pytest.param(each, marks=pytest.mark.full) for each in cases]
