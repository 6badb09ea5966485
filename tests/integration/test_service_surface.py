"""What every service shows of itself: health, reflection and metrics."""

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from corolla.block_server.service import BlockServer
from corolla.chassis.channels import open_channel
from corolla.chassis.metrics import INTER_TOKEN_BUCKETS, TIME_TO_FIRST_TOKEN_BUCKETS
from corolla.router.service import RouterProcess
from corolla.v1 import generation_pb2 as pb
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.metrics import exported
from tests.integration.refusals import refusal
from tests.integration.swarm import Swarm, tiny_swarm

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "router": "corolla.v1.RouterService",
    "block server": "corolla.v1.BlockService",
    "client": "corolla.v1.GenerationService",
}
each_service = pytest.mark.parametrize("kind", SERVICES)

# The names that are promised to dashboards and alerts, as far as their subject exists here.
PROMISED = {
    "router": {"corolla_span_ready_replicas", "corolla_uncovered_blocks", "corolla_rpc_seconds", "corolla_rpcs"},
    "block server": {
        "corolla_kv_cache_usage_ratio",
        "corolla_hop_step_seconds",
        "corolla_hop_tokens",
        "corolla_prefix_cache_queries",
        "corolla_prefix_cache_hits",
    },
    "client": {
        "corolla_time_to_first_token_seconds", "corolla_inter_token_latency_seconds",
        "corolla_e2e_request_latency_seconds", "corolla_num_requests_running", "corolla_num_requests_waiting",
        "corolla_prompt_tokens", "corolla_generation_tokens", "corolla_cached_prompt_tokens", "corolla_request_success",
        "corolla_recomputed_tokens", "corolla_rpc_seconds", "corolla_rpcs", "corolla_errors",
    },
}  # fmt: skip


def labelled() -> set[str]:
    """Names of the metrics with labels, by the reference page: they have no sample before the first thing to count."""
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.read_text().splitlines() if "|" in line]
    return {name.strip("`").removesuffix("_total") for name, _, labels in rows if labels}


swarm = tiny_swarm(["0:2", "2:5"])


def services(swarm: Swarm) -> dict[str, Any]:
    return {"router": swarm.router, "block server": swarm.servers[0], "client": swarm.clients[0]}


def address(service: Any) -> str:
    """The address of a service's gRPC."""
    return f"127.0.0.1:{service.control_port if isinstance(service, BlockServer) else service.port}"


async def reflected(channel: Any, version: str, **asked: Any) -> Any:
    """What reflection answers in one of its versions, whose messages are the same."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    async for answer in ask(iter([reflection_pb2.ServerReflectionRequest(**asked)])):
        return answer
    raise AssertionError("no answer")


@each_service
async def test_health_reports_the_process_and_each_of_its_services(kind: str, swarm: Swarm) -> None:
    async with open_channel(address(services(swarm)[kind])) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICES[kind], "grpc.health.v1.Health"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="corolla.v1.NoService"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@each_service
async def test_reflection_lists_and_describes_what_is_served(kind: str, version: str, swarm: Swarm) -> None:
    async with open_channel(address(services(swarm)[kind])) as channel:
        listed = await reflected(channel, version, list_services="")
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {SERVICES[kind], *(f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha"))}
        for name in names:
            answer = await reflected(channel, version, file_containing_symbol=name)
            (data, *_) = answer.file_descriptor_response.file_descriptor_proto
            described = FileDescriptorProto.FromString(data)
            package, _, service = name.rpartition(".")
            assert (described.package, service in {each.name for each in described.service}) == (package, True)


@each_service
async def test_health_says_not_serving_before_the_service_stops(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And reflection, switched off here, is not there."""
    folder = tmp_path_factory.mktemp("stopping")
    model = make_tiny_checkpoint("llama", folder / "tiny")
    off = {"reflection": False, "grace_s": 60.0}
    async with Swarm(folder, model, ["0:2", "2:5"], server=off, client=off) as swarm:
        settings = swarm.router.settings.model_copy(update={"port": 0, **off})
        router = RouterProcess(settings)
        await router.start()
        service = {**services(swarm), "router": router}[kind]
        async with open_channel(address(service)) as channel, swarm.connect() as client:
            # The call sends no request: one that is still being sent when the refusal comes fails with another status.
            reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
            assert await reflection.ServerReflectionInfo().code() is grpc.StatusCode.UNIMPLEMENTED
            stub: Any = health_pb2_grpc.HealthStub(channel)
            calls = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICES[kind])]
            watches = [aiter(call) for call in calls]
            assert [(await anext(watch)).status for watch in watches] == [SERVING, SERVING]
            stream = client.stream("the thin man", max_tokens=200, ignore_eos=True)
            await anext(stream)
            stopping = asyncio.create_task(service.stop())
            assert [(await anext(watch)).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
            for call in calls:
                call.cancel()
            # Watchers are told while the running answer goes on to its end.
            assert not stopping.done()
            assert sum([len(chunk.token_ids) async for chunk in stream]) == 199
        await stopping
        if service is not router:
            await router.stop()
        lists: dict[str, list[Any]] = {"router": [], "block server": swarm.servers, "client": swarm.clients}
        del lists[kind][:1]


async def test_an_answer_cut_off_by_a_stop_may_be_repeated_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut-off")
    model = make_tiny_checkpoint("llama", folder / "tiny", config_changes={"max_position_embeddings": 8192})
    stopping_parameters = pb.StoppingParameters(max_tokens=6000, ignore_eos=True)
    request = pb.GenerateRequest(text="the thin man", stopping=stopping_parameters)
    async with Swarm(folder, model, ["0:5"], client={"grace_s": 0.2}) as swarm, open_channel(swarm.address) as channel:
        cut = [asyncio.create_task(refusal(channel, method, request)) for method in ("Generate", "GenerateStream")]
        await asyncio.sleep(0.3)
        await swarm.clients.pop().stop()
        assert [refused.code for refused in await asyncio.gather(*cut)] == [grpc.StatusCode.UNAVAILABLE] * 2
        await swarm.until_empty()


@each_service
async def test_services_export_the_metrics_that_dashboards_use(kind: str, swarm: Swarm) -> None:
    await use(swarm)
    families = {family.name: family for family in await exported(services(swarm)[kind].metrics_port)}
    assert families.keys() >= PROMISED[kind]
    for family in families.values():
        assert family.name.startswith(("corolla_", "process_", "python_"))
        assert family.documentation
        assert family.samples or family.type == "unknown" or family.name in labelled()
    buckets = {
        "corolla_time_to_first_token_seconds": TIME_TO_FIRST_TOKEN_BUCKETS,
        "corolla_inter_token_latency_seconds": INTER_TOKEN_BUCKETS,
    }
    for name in buckets.keys() & families.keys():
        bounds = [each.labels["le"] for each in families[name].samples if each.name.endswith("_bucket")]
        assert [float(bound) for bound in bounds] == [*buckets[name], float("inf")]


@each_service
async def test_no_label_names_a_session_a_request_a_tenant_or_a_server(kind: str, swarm: Swarm) -> None:
    session_id = await use(swarm)
    for family in await exported(services(swarm)[kind].metrics_port):
        if not family.name.startswith("corolla_"):
            continue
        for each in family.samples:
            assert each.labels.keys() <= {
                "le", "method", "code", "reason", "kind", "state", "model", "span", "script",
                "finished_reason", "cause", "direction", "outcome", "fault", "task", "invariant", "quota", "digest",
                "standby",
            }, family.name  # fmt: skip
            said = " ".join(each.labels.values())
            assert session_id not in said
            assert not re.search(r"[0-9a-f]{16}|127\.0\.0\.1|thin man|public", said), family.name


async def use(swarm: Swarm) -> str:
    """Calls that make all metrics move, a refused and a session's among them; returns the session's id."""
    async with swarm.connect() as client, client.chat() as chat, open_channel(swarm.address) as channel:
        await chat.send("the thin man", max_tokens=3)
        await chat.send("the thin man", max_tokens=3)
        await refusal(channel, "Generate", b"\xff")
        return await chat.open()


async def test_a_block_server_that_can_compute_nothing_reports_it(tmp_path: Path) -> None:
    model = make_tiny_checkpoint("llama", tmp_path / "tiny")
    async with Swarm(tmp_path, model, ["0:5"]) as swarm, open_channel(address(swarm.servers[0])) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = aiter(stub.Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        for _ in range(3):
            swarm.servers[0].engine.failures.failed()
        assert (await anext(watch)).status == NOT_SERVING
