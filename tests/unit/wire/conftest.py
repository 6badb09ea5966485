"""Services run on uvloop, the library on the loop that Python brings, on which `make test` runs no test of the wire."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and "[asyncio" in item.name:
            item.add_marker(pytest.mark.full)
