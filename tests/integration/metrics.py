"""The metrics of a service, read as Prometheus reads them."""

import asyncio
import urllib.request
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


async def exported(port: int) -> list[Metric]:
    """The metric families that a service exports on this machine."""

    def read() -> list[Metric]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
            return list(text_string_to_metric_families(response.read().decode()))

    return await asyncio.to_thread(read)


async def sample(port: int, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels; 0 where there is none."""
    return sum(value for _, given, value in _samples(await exported(port), name) if labels.items() <= given.items())


def _samples(families: list[Metric], name: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in families:
        for each in family.samples:
            if each.name == name:
                yield each.name, each.labels, each.value
