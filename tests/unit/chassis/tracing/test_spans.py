"""Spans: what is under what, what they say of failures, and that none is made where no collector is named."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from corolla.chassis.errors import CorollaError, InvalidRequest, NoChain
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import current_span_id, trace_headers, trace_parent


class Collected(InMemorySpanExporter):
    def named(self, name: str) -> ReadableSpan:
        (found,) = [each for each in self.get_finished_spans() if each.name == name]
        return found


@pytest.fixture
def collected() -> Iterator[Collected]:
    collected = Collected()
    provider = TracerProvider(sampling.DEFAULT_ON, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(collected))
    spans.use(provider.get_tracer("tests"))
    yield collected
    spans.use(None)


def parent_id(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def own_id(span: ReadableSpan) -> int:
    return span.get_span_context().span_id  # type: ignore[union-attr]


async def test_what_begins_within_a_span_is_under_it(collected: Collected) -> None:
    async def answer() -> None:
        with spans.request("request", None, trusts_caller=False):
            with spans.span("open", hops=["a", "b"]):
                await asyncio.gather(*(replay() for _ in "ab"))
            spans.event("first token")

    async def replay() -> None:
        with spans.span("replay"):
            await asyncio.sleep(0)

    await asyncio.create_task(answer())
    request, opened = collected.named("request"), collected.named("open")
    assert parent_id(opened) == own_id(request)
    assert opened.attributes == {"corolla.hops": ("a", "b")}
    replays = [each for each in collected.get_finished_spans() if each.name == "replay"]
    assert [parent_id(each) for each in replays] == [own_id(opened)] * 2
    assert [each.name for each in request.events] == ["first token"]


async def test_what_outlives_a_request_is_not_its(collected: Collected) -> None:
    ended = asyncio.Event()

    async def look() -> tuple[object, bytes]:
        await ended.wait()
        with spans.span("open"):
            return trace_headers(), current_span_id()

    async def answer() -> asyncio.Task[tuple[object, bytes]]:
        with spans.request("request", None, trusts_caller=False):
            return asyncio.create_task(look())

    looking = await asyncio.create_task(answer())
    ended.set()
    assert await looking == ({}, b"")
    assert [each.name for each in collected.get_finished_spans()] == ["request"]


async def test_a_request_may_be_closed_by_another_task(collected: Collected, caplog: pytest.LogCaptureFixture) -> None:
    async def tokens() -> AsyncGenerator[int, None]:
        with spans.request("request", None, trusts_caller=False):
            yield 1
            yield 2

    generator = tokens()
    assert await asyncio.create_task(anext(generator)) == 1
    await asyncio.create_task(generator.aclose())
    assert (collected.named("request").attributes or {})["error.type"] == "CANCELLED"
    assert not caplog.records


@pytest.mark.parametrize(
    "failure, label, is_error",
    [
        (InvalidRequest("text", "the secret text"), "INVALID_REQUEST", False),
        (NoChain("no server"), "NO_CHAIN", True),
        (ValueError("the secret text"), "INTERNAL", True),
    ],
)
def test_a_failure_is_its_label_and_never_its_text(
    collected: Collected, failure: Exception, label: str, *, is_error: bool
) -> None:
    with pytest.raises(type(failure)), spans.request("request", None, trusts_caller=False):
        raise failure
    request = collected.named("request")
    expected = failure.reason if isinstance(failure, CorollaError) else label
    assert (request.attributes or {})["error.type"] == expected
    assert request.status.is_ok is not is_error
    assert "secret" not in request.to_json()


@pytest.mark.parametrize("flags", ["00", "01"])
def test_only_a_sampled_call_of_another_service_has_a_span(collected: Collected, flags: str) -> None:
    caller = trace_parent({"traceparent": f"00-{'a' * 32}-{'b' * 16}-{flags}"})
    with spans.served("Service/Method", caller), spans.span("open"):
        pass
    names = [each.name for each in collected.get_finished_spans()]
    assert names == (["open", "Service/Method"] if flags == "01" else [])


def test_what_took_so_long_ended_now(collected: Collected) -> None:
    parent = trace_parent({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert parent is not None
    spans.record("decode", parent, 0.25, {"server.port": 1}, NoChain("secret"))
    decode = collected.named("decode")
    assert (decode.end_time or 0) - (decode.start_time or 0) == 250_000_000
    assert decode.attributes == {"server.port": 1, "error.type": "NO_CHAIN"}
    assert "secret" not in decode.to_json()


def test_without_a_collector_no_span_is_made() -> None:
    caller = trace_parent({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert not spans.is_collected()
    with spans.request("request", caller, trusts_caller=True) as request, spans.span("open") as opened:
        assert not request.is_sampled
        assert not opened.is_sampled
        opened.note(hops=["a"])
    assert spans.served("Service/Method", caller) is spans.NOT_SAMPLED
