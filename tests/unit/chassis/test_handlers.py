"""Every service's gRPC handlers: the exception of a servicer, and the status that its caller gets."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from corolla.chassis.channels import CallerBounds, open_channel
from corolla.chassis.errors import QueueFull, Unauthenticated
from corolla.chassis.handlers import Call, service_handler
from corolla.chassis.metrics import RpcMetrics
from corolla.chassis.rpc_server import RpcServer
from corolla.client.held_bytes import HeldBytes
from corolla.v1 import generation_pb2 as pb
from tests.integration.refusals import Refusal, refusal, refusal_of
from tests.integration.waiting import until

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]
STREAM = "GenerationService/GenerateStream"
REPLY_BYTES = 8 << 20
"""More than gRPC sends ahead of its reader."""
HELD_BYTES = 1400
SECRET = "the prompt of somebody"


class Panic(BaseException):
    """Rust code that panics raises a class like this one."""


class Servicer:
    """Fails in all ways; the request chooses which."""

    def __init__(self) -> None:
        self.num_cleanups = 0

    async def Generate(self, request: pb.GenerateRequest, call: Any) -> pb.GenerateResponse:
        if request.model == "wait":
            await asyncio.sleep(60)
        if request.model == "large":
            return pb.GenerateResponse(model="x" * REPLY_BYTES)
        raise self._failure(request.model)

    async def GenerateStream(self, request: pb.GenerateRequest, call: Any) -> AsyncIterator[pb.GenerateChunk]:
        try:
            yield pb.GenerateChunk(text_delta="first")
            if request.model == "wait":
                await asyncio.sleep(60)
            while request.model == "much":
                yield pb.GenerateChunk(text_delta="x" * (1 << 18))
            raise self._failure(request.model)
        finally:
            self.num_cleanups += 1

    def _failure(self, kind: str) -> BaseException:
        match kind:
            case "typed":
                return QueueFull("come again", retry_after_s=2.5)
            case "panic":
                return Panic(SECRET)
        return RuntimeError(SECRET)


class Running:
    """A served servicer, and its metrics."""

    def __init__(
        self, address: str, channel: grpc.aio.Channel, servicer: Servicer, registry: CollectorRegistry
    ) -> None:
        self.address, self.channel, self.servicer, self._registry = address, channel, servicer, registry

    async def is_cleaned_up(self) -> bool:
        return self.servicer.num_cleanups > 0

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(name, labels) or 0


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    registry, servicer = CollectorRegistry(), Servicer()
    metrics, bounds = RpcMetrics(registry), CallerBounds(1000, 8, 60.0)
    server = RpcServer("127.0.0.1", 0, with_reflection=False, callers=bounds, metrics=metrics)
    server.add(
        SERVICE,
        service_handler(
            SERVICE, servicer, metrics, max_request_bytes=1000, reader_timeout_s=4.0,
            most_reply_bytes=lambda metadata: int(dict(metadata).get("receives", 2 * REPLY_BYTES)),
            hold=HeldBytes(HELD_BYTES).hold,
        ),
    )  # fmt: skip
    await server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        async with open_channel(address) as channel:
            yield Running(address, channel, servicer, registry)
    finally:
        await server.stop(0)


def kinds(refused: Refusal) -> tuple[grpc.StatusCode, str]:
    return refused.code, refused.reason


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_an_error_of_the_tree_leaves_as_its_status(method: str) -> None:
    async with running() as service:
        refused = await refusal(service.channel, method, pb.GenerateRequest(model="typed"))
        assert kinds(refused) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert (refused.message, refused.retry_after_s) == ("come again", 2.5)
        assert service.count("corolla_errors_total", reason="QUEUE_FULL") == 1
        name = f"GenerationService/{method}"
        assert service.count("corolla_rpcs_total", method=name, code="RESOURCE_EXHAUSTED", fault="service") == 1


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize("kind, raised", [("untyped", "RuntimeError"), ("panic", "Panic")])
async def test_any_other_exception_is_internal_and_its_text_goes_nowhere(
    kind: str, raised: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running() as service:
        refused = await refusal(service.channel, method, pb.GenerateRequest(model=kind))
        assert kinds(refused) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert SECRET not in f"{refused.message}{refused.details}"
        assert service.count("corolla_errors_total", reason="INTERNAL") == 1
    (record,) = [record for record in caplog.records if record.message == "unexpected failure"]
    assert f"{raised} at test_handlers.py" in vars(record)["where"]
    assert all(SECRET not in f"{record.getMessage()} {vars(record)} {record.exc_text}" for record in caplog.records)


async def test_malformed_and_oversized_messages_have_their_own_statuses() -> None:
    async with running() as service:
        assert kinds(await refusal(service.channel, "Generate", b"\xff")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "MALFORMED_MESSAGE",
        )
        too_long = await refusal(service.channel, "Generate", bytes(1001))
        assert kinds(too_long) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert too_long.metadata == {"max_request_bytes": "1000"}
        # gRPC itself refuses what is far too long, and the service counts that as what it is.
        untyped: Any = service.channel
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped.unary_unary(f"/{SERVICE.full_name}/Generate")(bytes(100_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        codes = {"method": "GenerationService/Generate", "code": "RESOURCE_EXHAUSTED", "fault": "caller"}
        await until(lambda: service.count("corolla_rpcs_total", **codes) == 2)


async def test_a_reply_above_what_its_caller_says_it_receives_is_refused_by_name() -> None:
    method, request = f"/{SERVICE.full_name}/Generate", pb.GenerateRequest(model="large").SerializeToString()
    outcomes = {"method": "GenerationService/Generate", "fault": "caller"}
    async with running() as service:
        untyped: Any = service.channel
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped.unary_unary(method)(request, metadata=[("receives", "1000")])
        assert kinds(refusal_of(caught.value)) == (grpc.StatusCode.INVALID_ARGUMENT, "REPLY_TOO_LARGE")
        assert service.count("corolla_rpcs_total", code="INVALID_ARGUMENT", **outcomes) == 1


@pytest.mark.parametrize("method, model", [("Generate", "wait"), ("GenerateStream", "wait"), ("Generate", "large")])
async def test_requests_and_replies_that_nobody_has_read_are_under_one_budget(method: str, model: str) -> None:
    text = "x" * (HELD_BYTES * 2 // 3) if model == "wait" else ""
    another = pb.GenerateRequest(model="panic", text="x" * (HELD_BYTES // 2))
    async with running() as service:

        async def refused() -> Refusal:
            return await refusal(service.channel, "GenerateStream", another)

        async def is_full() -> bool:
            return (await refused()).reason == "QUEUE_FULL"

        async def has_room() -> bool:
            return (await refused()).reason == "INTERNAL"

        assert await has_room()
        untyped: Any = service.channel
        request = pb.GenerateRequest(model=model, text=text).SerializeToString()
        call = untyped.unary_stream(f"/{SERVICE.full_name}/{method}")(request)
        await until(is_full)
        assert (await refused()).retry_after_s == 1
        if model == "large":
            assert len(await call.read()) > REPLY_BYTES, "what is made already is sent"
        else:
            call.cancel()
        await until(has_room)


@pytest.mark.parametrize(
    "path, series",
    [
        ("/corolla.v1.GenerationService/Tokenize", "GenerationService/unknown"),
        ("/corolla.v1.GenerationService2/Generate", "unknown"),
        ("/grpc.health.v1.Health/Invented", "unknown"),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "unknown"),
    ],
)
async def test_a_method_that_is_not_served_is_unimplemented(path: str, series: str) -> None:
    async with running() as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.channel.unary_unary(path)(b"")  # type: ignore[arg-type]
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert service.count("corolla_rpcs_total", method=series, code="UNIMPLEMENTED", fault="caller") == 1


async def test_the_servicer_cleans_up_when_its_caller_leaves() -> None:
    async with running() as service:
        untyped: Any = service.channel
        call = untyped.unary_stream(f"/corolla.v1.{STREAM}")(pb.GenerateRequest(model="wait").SerializeToString())
        assert await call.read()
        call.cancel()
        await until(service.is_cleaned_up)
        assert service.servicer.num_cleanups == 1
        name = "GenerationService/GenerateStream"
        assert service.count("corolla_rpcs_total", method=name, code="CANCELLED", fault="caller") == 1


async def test_a_caller_that_stops_reading_is_given_up_and_gets_the_error_when_it_reads_again() -> None:
    async with running() as service:
        untyped: Any = service.channel
        call = untyped.unary_stream(f"/corolla.v1.{STREAM}")(pb.GenerateRequest(model="much").SerializeToString())
        for _ in range(20):  # slow, but not too slow
            assert await call.read()
            await asyncio.sleep(0.02)
        assert not service.servicer.num_cleanups
        await until(service.is_cleaned_up)
        assert service.count("corolla_errors_total", reason="CALLER_STALLED") == 1
        assert service.count("corolla_rpcs_total", method=STREAM, code="DEADLINE_EXCEEDED", fault="caller") == 0
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        failure = grpc.aio.AioRpcError(await call.code(), await call.initial_metadata(), await call.trailing_metadata())
        assert kinds(refusal_of(failure)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "CALLER_STALLED")
        assert service.count("corolla_errors_total", reason="CALLER_STALLED") == 1
        assert service.count("corolla_rpcs_total", method=STREAM, code="DEADLINE_EXCEEDED", fault="caller") == 1


async def test_a_response_that_its_caller_refuses_was_not_sent() -> None:
    async with running() as service, grpc.aio.insecure_channel(service.address) as channel:
        untyped: Any = channel
        request, name = pb.GenerateRequest(model="large").SerializeToString(), "GenerationService/Generate"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await untyped.unary_unary(f"/corolla.v1.{name}")(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(lambda: service.count("corolla_rpcs_total", method=name, code="CANCELLED", fault="caller") == 1)
        assert service.count("corolla_rpcs_total", method=name, code="OK", fault="none") == 0


async def test_a_stalled_caller_may_leave_silently() -> None:
    async with running() as service:
        async with open_channel(service.address) as channel:
            untyped: Any = channel
            request = pb.GenerateRequest(model="much", text="x" * (HELD_BYTES * 2 // 3))
            call = untyped.unary_stream(f"/corolla.v1.{STREAM}")(request.SerializeToString())
            assert await call.read()
            await until(service.is_cleaned_up)
            another = pb.GenerateRequest(model="typed", text=request.text)
            assert (await refusal(service.channel, "Generate", another)).message == "come again", "its bytes are free"
        await until(lambda: service.count("corolla_rpcs_total", method=STREAM, code="CANCELLED", fault="caller") == 1)
        assert service.servicer.num_cleanups == 1


async def refuse(call: Call[Any]) -> None:
    raise Unauthenticated(f"nobody may call {call.method}")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_a_refused_caller_who_holds_back_its_request_hears_so_before_it_sends_it(method: str) -> None:
    server = RpcServer("127.0.0.1", 0, with_reflection=False)
    handler = service_handler(SERVICE, Servicer(), RpcMetrics(CollectorRegistry()), authenticate=refuse)
    server.add(SERVICE, handler)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            call: Any = channel.stream_stream(f"/{SERVICE.full_name}/{method}")()
            assert await asyncio.wait_for(call.code(), 5) is grpc.StatusCode.UNAUTHENTICATED
            assert await call.details() == f"nobody may call GenerationService/{method}"
    finally:
        await server.stop(0)
