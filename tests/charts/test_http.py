"""HTTP of the chart: its port everywhere or nowhere, and examples that lead to it."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.charts.rendering import CHART, CURRENT, Object, named, of_kind, pod_specs, render

EXAMPLES = CHART / "examples"
VERSION = CURRENT.rpartition(".")[0]


def example(name: str) -> list[Object]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")))


def ports(service: Object) -> dict[str, int]:
    return {each["name"]: each["port"] for each in service["spec"]["ports"]}


@pytest.mark.parametrize("port", [8080, 80, 0])
def test_the_port_is_open_or_nowhere(port: int) -> None:
    objects = render({"client": {"service": {"httpPort": port}}})
    (container,) = pod_specs(objects)["rel-corolla-client"]["containers"]
    listening: dict[str, Any] = {each["name"]: each["containerPort"] for each in container["ports"]}
    settings = named(objects, "ConfigMap", "rel-corolla-client")["data"]
    allowed = named(objects, "NetworkPolicy", "rel-corolla-client")["spec"]["ingress"][0]["ports"]
    assert ports(named(objects, "Service", "rel-corolla-client")).get("http", 0) == port
    assert ports(named(objects, "Service", "rel-corolla-client-pods")).get("http") == (8080 if port else None)
    assert listening.get("http") == (8080 if port else None)
    assert settings.get("COROLLA_HTTP_PORT") == ("8080" if port else None)
    assert ({"port": "http", "protocol": "TCP"} in allowed) == (port > 0)


def test_the_ingress_leads_to_the_service() -> None:
    (ingress,) = example("ingress.yaml")
    kubernetes_validate.validate(ingress, VERSION, strict=True)
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    backend = path["backend"]["service"]
    service = named(render(), "Service", f"rel-{backend['name']}")
    assert backend["port"]["name"] in ports(service)


def test_the_gateway_leads_to_the_service() -> None:
    gateway, *routes = example("gateway.yaml")
    assert [each["kind"] for each in (gateway, *routes)] == ["Gateway", "HTTPRoute", "GRPCRoute"]
    for route, name in zip(routes, ("http", "grpc"), strict=True):
        assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
        ((backend,),) = [each["backendRefs"] for each in route["spec"]["rules"]]
        assert ports(named(render(), "Service", f"rel-{backend['name']}"))[name] == backend["port"]


def test_examples_are_no_part_of_a_release() -> None:
    assert of_kind(render(), "Ingress", "Gateway", "HTTPRoute", "GRPCRoute") == []
