"""A metric's name means the same in every service: dashboards add up series of one name."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from corolla.block_server.metrics import BlockServerMetrics
from corolla.chassis.metrics import RpcMetrics
from corolla.client.metrics import ClientMetrics
from corolla.router.metrics import RouterMetrics


def test_no_two_services_mean_different_things_by_one_name() -> None:
    services: list[Callable[[CollectorRegistry], object]] = [
        RpcMetrics, BlockServerMetrics, RouterMetrics, ClientMetrics,
    ]  # fmt: skip
    meanings: dict[str, set[str]] = {}
    for service in services:
        registry = CollectorRegistry()
        service(registry)
        for family in registry.collect():
            meanings.setdefault(family.name, set()).add(family.documentation)
    assert meanings
    assert {name: texts for name, texts in meanings.items() if len(texts) > 1} == {}
