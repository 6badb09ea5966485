"""The metrics of a service, read as Prometheus reads them."""

import asyncio
import urllib.request
from collections.abc import Callable

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.waiting import until


async def exported(port: int, name: str = "") -> list[Metric]:
    """The metric families that a service exports on this machine.

    Args:
        port: of its metrics.
        name: what the names of the wanted samples begin with: tests wait for values, and parsing all takes long.
    """

    def read() -> list[Metric]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            lines: list[str] = response.read().decode().splitlines(keepends=True)
        return list(text_string_to_metric_families("".join(line for line in lines if line.startswith(name))))

    return await asyncio.to_thread(read)


async def sample(port: int, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels; 0 where there is none."""
    return sum(
        each.value
        for family in await exported(port, name)
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    )


async def until_sample(port: int, name: str, holds: Callable[[float], bool], **labels: str) -> None:
    """Waits until the sum of the samples is as it should be."""

    async def is_so() -> bool:
        return holds(await sample(port, name, **labels))

    await until(is_so)
