"""Pods with GPUs: how they ask for them, where compiled kernels and shared memory are, and when they are ready."""

from typing import Any, Final

import pytest

from corolla.chassis.weight_formats import default_dtype
from tests.charts.rendering import ALL_APIS, OLDEST, Object, Refused, named, of_kind, pod_specs, render

NAME: Final = "rel-corolla-block-server-main"
WITHOUT_CLAIMS: Final = tuple(api for api in ALL_APIS if not api.startswith("resource.k8s.io"))


def with_gpu(**gpu: Any) -> Object:
    return {"blockServer": {"defaults": {"gpu": {"count": 1, **gpu}}}}


def spec_of(values: Object, **options: Any) -> Object:
    return dict(pod_specs(render(values, **options))[NAME])


def test_a_slice_of_a_gpu_is_a_resource_of_another_name() -> None:
    spec = spec_of(with_gpu(resource="nvidia.com/mig-3g.40gb"), apis=WITHOUT_CLAIMS)
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/mig-3g.40gb": 1}
    assert "claims" not in container["resources"]
    assert "resourceClaims" not in spec


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_claims_take_the_place_of_the_resource_where_the_cluster_has_them(version: str) -> None:
    selectors = [{"cel": {"expression": "device.attributes['gpu.nvidia.com'].productName.startsWith('NVIDIA H100')"}}]
    values = with_gpu(deviceClass="gpu.nvidia.com", deviceSelectors=selectors)
    objects = render(values, apis=(*WITHOUT_CLAIMS, f"resource.k8s.io/{version}"))
    (template,) = of_kind(objects, "ResourceClaimTemplate")
    assert template["apiVersion"] == f"resource.k8s.io/{version}"
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    devices = request if version == "v1beta1" else request["exactly"]
    assert (request["name"], devices["deviceClassName"], devices["count"]) == ("gpu", "gpu.nvidia.com", 1)
    assert devices["selectors"] == selectors
    spec = pod_specs(objects)[NAME]
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    (container,) = spec["containers"]
    assert container["resources"]["claims"] == [{"name": "gpu"}]
    assert container["resources"]["limits"] == {"memory": "8Gi"}
    assert named(objects, "ConfigMap", NAME)["data"]["COROLLA_DEVICE"] == "cuda"


@pytest.mark.parametrize("how", [{}, {"deviceClass": "gpu.nvidia.com"}])
def test_gpus_that_would_stand_idle_are_refused(how: Object) -> None:
    with pytest.raises(Refused, match=r"gpu\.count is 2, and a block server computes on one .* raise replicas"):
        render(with_gpu(count=2, **how))


def test_claims_need_a_cluster_that_has_them_and_a_gpu_to_claim() -> None:
    with pytest.raises(Refused, match="needs a cluster with dynamic resource allocation"):
        render(with_gpu(deviceClass="gpu.nvidia.com"), apis=WITHOUT_CLAIMS, kubernetes=OLDEST)
    on_cpu = render(with_gpu(deviceClass="gpu.nvidia.com", count=0), apis=WITHOUT_CLAIMS, kubernetes=OLDEST)
    assert of_kind(on_cpu, "ResourceClaimTemplate") == []
    assert "resourceClaims" not in pod_specs(on_cpu)[NAME]


@pytest.mark.parametrize(
    "pools, dtype, device",
    [
        ({"main": {}}, "", "cpu"),
        ({"main": {}, "large": {"gpu": {"count": 1}}}, "", "cuda"),
        ({"main": {"gpu": {"count": 1}}}, "float16", "cuda"),
    ],
)
def test_all_pods_have_the_type_that_a_server_takes_by_itself_unless_one_is_set(
    pools: Object, dtype: str, device: str
) -> None:
    objects = render({"model": {"dtype": dtype}, "blockServer": {"pools": pools}})
    found = {
        each["metadata"]["name"]: each["data"]["COROLLA_DTYPE"]
        for each in of_kind(objects, "ConfigMap")
        if "COROLLA_DTYPE" in each["data"]
    }
    assert len(found) == len(pools) + 1, "block servers by pool, and client services"
    assert set(found.values()) == {dtype or default_dtype(device)}


def test_compiled_kernels_have_a_folder_that_can_be_written_and_may_be_a_claim() -> None:
    for cache, volume in (
        ({}, {"emptyDir": {"sizeLimit": "4Gi"}}),
        ({"existingClaim": "kernels"}, {"persistentVolumeClaim": {"claimName": "kernels"}}),
    ):
        objects = render(with_gpu(kernelCache=cache))
        spec = pod_specs(objects)[NAME]
        (container,) = spec["containers"]
        folder = named(objects, "ConfigMap", NAME)["data"]["TRITON_CACHE_DIR"]
        assert {"name": "kernels", "mountPath": folder} in container["volumeMounts"]
        assert {"name": "kernels", **volume} in spec["volumes"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "TRITON_CACHE_DIR" not in named(render(), "ConfigMap", NAME)["data"]
    assert "kernels" not in [each["name"] for each in spec_of({})["volumes"]]


def test_shared_memory_is_as_large_as_asked_for() -> None:
    spec = spec_of(with_gpu(sharedMemory="2Gi"))
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    assert "shm" not in [each["name"] for each in spec_of(with_gpu())["volumes"]]


def test_a_pod_is_not_restarted_and_gets_no_traffic_while_it_loads() -> None:
    """The port of gRPC is open from the start of the process; health there says SERVING once the blocks are loaded."""
    values = with_gpu()
    values["blockServer"]["defaults"]["startupSeconds"] = 7200
    objects = render(values)
    (container,) = pod_specs(objects)[NAME]["containers"]
    assert container["startupProbe"]["tcpSocket"] == container["livenessProbe"]["tcpSocket"] == {"port": 50053}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 7200
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9464}
    assert named(objects, "Deployment", NAME)["spec"]["progressDeadlineSeconds"] > 7200
