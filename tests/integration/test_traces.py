"""A collector gets, for each request, what each service did for how long on every hop, and nothing of what was said."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from corolla import Client
from corolla.block_server.step_spans import DECODE_RUN_TOKENS
from corolla.chassis.errors import ContextLengthExceeded, HopUnavailable, NoChain
from corolla.chassis.tracing import spans
from corolla.local.options import StackOptions
from corolla.local.stack import Stack
from corolla.v1 import generation_pb2, generation_pb2_grpc
from tests.integration.gates import hand_over
from tests.integration.swarm import Swarm
from tests.integration.waiting import until
from tests.trace_collector import CollectedSpan, TraceCollector, tree

SPANS = ["0:2", "2:5"]
WORDS = ("the", "thin", "man", "inner", "tent", "anthem", "either", "hand")
PROMPT = " ".join(WORDS * 12)
OPTIONS: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True}
CALLERS_TRACE, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collecting(sampler: sampling.Sampler = sampling.DEFAULT_ON) -> Iterator[TraceCollector]:
    """Gets the spans of this process, each as soon as it has ended."""
    with TraceCollector() as collector:
        provider = TracerProvider(sampler, Resource({"service.name": "swarm"}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"http://{collector.address}")))
        spans.use(provider.get_tracer("tests"))
        try:
            yield collector
        finally:
            spans.use(None)
            provider.shutdown()


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with collecting() as collector:
        yield collector


def swarm_of(folder: Path, model: Path, spans_of_servers: list[str], **client: Any) -> Swarm:
    server = {"prefix_cache": False, "grace_s": 120.0}
    return Swarm(folder, model, spans_of_servers, server=server, client={"prefill_chunk_tokens": 64, **client})


async def ended(collector: TraceCollector, number: int = 1) -> list[CollectedSpan]:
    """The spans of so many requests, which have ended, in the order of their ends."""

    def are_there() -> bool:
        return len(requests_of(collector)) >= number

    await asyncio.to_thread(collector.wait, are_there)
    return sorted(requests_of(collector), key=lambda each: each.span.end_time_unix_nano)


def requests_of(collector: TraceCollector) -> list[CollectedSpan]:
    return [each for each in collector.spans if each.name.endswith(" tiny")]


def under(collector: TraceCollector, parent: CollectedSpan, name: str) -> list[CollectedSpan]:
    return [each for each in collector.named(name) if each.is_under(parent)]


async def test_a_request_over_two_hops_is_one_tree(tmp_path: Path, model: Path, collector: TraceCollector) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        answer = await client.generate(PROMPT, temperature=0.5, seed=1, **OPTIONS)
        (request,) = await ended(collector)
        assert request.name == "text_completion tiny"
        assert not request.span.parent_span_id
        num_prompt_tokens = answer.usage.prompt_tokens
        asked = {"operation.name": "text_completion", "request.model": "tiny", "request.max_tokens": 70,
                 "request.temperature": 0.5, "usage.input_tokens": num_prompt_tokens, "usage.output_tokens": 70,
                 "response.finish_reasons": ["length"]}  # fmt: skip
        assert request.attributes.items() >= {f"gen_ai.{key}": value for key, value in asked.items()}.items()
        assert [each.name for each in request.span.events] == ["first token"]

        assert not under(collector, request, "RouterService/PlanChain"), "the client service plans by itself"
        (opened,) = under(collector, request, "open")
        hops = [f"{each.address} {each.settings.blocks}" for each in swarm.servers]
        assert opened.attributes["corolla.hops"] == hops
        (prefill,) = under(collector, request, "prefill")
        pieces = under(collector, prefill, "prefill")
        for server in swarm.servers:
            mine = [each for each in pieces if each.server_id == server.server_id]
            assert len(mine) == -(-num_prompt_tokens // 64)
            assert [each.attributes["corolla.position"] for each in mine] == [64 * n for n in range(len(mine))]
            assert sum(each.attributes["corolla.tokens"] for each in mine) == num_prompt_tokens
            assert {each.attributes["server.port"] for each in mine} == {server.port}
        decoded = under(collector, request, "decode")
        by_hop = [
            [each.attributes["corolla.position"] for each in decoded if each.server_id == server.server_id]
            for server in swarm.servers
        ]
        assert by_hop[0] == by_hop[1]
        assert len(by_hop[0]) == (num_prompt_tokens + 69) // DECODE_RUN_TOKENS - num_prompt_tokens // DECODE_RUN_TOKENS
        # All of it, and nothing else.
        assert {each.span.trace_id for each in collector.spans} == {request.span.trace_id}
        shown = tree(collector.spans, request).splitlines()
        assert len(shown) == len(collector.spans)


async def test_a_lost_hop_is_a_recovery_that_names_it(tmp_path: Path, model: Path, collector: TraceCollector) -> None:
    async with swarm_of(tmp_path, model, [*SPANS, SPANS[1]]) as swarm, swarm.connect() as client:
        undisturbed = await client.generate(PROMPT, max_tokens=400, ignore_eos=True)
        answering = asyncio.create_task(client.generate(PROMPT, max_tokens=400, ignore_eos=True))
        await until(
            lambda: any(held.cache.num_tokens > undisturbed.usage.prompt_tokens for held in swarm.servers[0].sessions)
        )
        (victim,) = [server for server in swarm.servers[1:] if server.sessions]
        await swarm.crash(victim)
        assert (await answering).token_ids == undisturbed.token_ids
        _, request = await ended(collector, 2)
        assert request.attributes["corolla.recoveries"] == 1
        (recovery,) = under(collector, request, "recovery")
        assert recovery.attributes["corolla.lost"] == victim.address
        assert recovery.attributes["corolla.cause"] == "hop_unavailable"
        assert recovery.attributes["corolla.method"] == "outputs"
        (opened,) = under(collector, recovery, "open")
        assert opened.attributes["corolla.hops"] == recovery.attributes["corolla.hops"]
        (replay,) = under(collector, recovery, "replay")
        assert (replay.attributes["corolla.source"], replay.attributes["corolla.start"]) == ("outputs", 0)
        # Only the server in its place computes.
        (other,) = [server for server in swarm.servers[1:] if server is not victim]
        pieces = [*under(collector, replay, "prefill"), *under(collector, replay, "decode")]
        assert {each.server_id for each in pieces} == {other.server_id}
        # A single token at its end may be no piece that has a span.
        num_missing = replay.attributes["corolla.end"] - sum(each.attributes["corolla.tokens"] for each in pieces)
        assert num_missing in (0, 1)
        decoded_on = {each.server_id for each in under(collector, request, "decode")}
        assert decoded_on >= {swarm.servers[0].server_id, other.server_id}
        swarm.servers.remove(victim)
        await swarm.until_empty()
        await victim.stop()


@pytest.mark.full
async def test_a_handover_is_a_span_of_the_server_that_leaves(
    tmp_path: Path, model: Path, collector: TraceCollector
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        num_prompt_tokens = (await client.generate(PROMPT, max_tokens=1)).usage.prompt_tokens
        answering = asyncio.create_task(client.generate(PROMPT, max_tokens=600, ignore_eos=True))
        # Past the prompt: what happens to that is under a span of its own.
        leaving, taker = await hand_over(swarm, 1, num_prompt_tokens)
        assert (await answering).usage.recoveries == 1
        _, request = await ended(collector, 2)
        # A round that finds the other server not ready yet has a span, too; another one follows.
        handovers = under(collector, request, "handover")
        (handover,) = [each for each in handovers if each.attributes["corolla.outcome"] == "moved"]
        said = {"outcome": "moved", "taker": taker.address, "server_id": leaving.server_id, "blocks": SPANS[1]}
        assert handover.attributes.items() >= {f"corolla.{key}": value for key, value in said.items()}.items()
        (recovery,) = under(collector, request, "recovery")
        assert (recovery.attributes["corolla.cause"], recovery.attributes["corolla.method"]) == (
            "hop_leaving", "reopen",
        )  # fmt: skip
        await swarm.until_empty()


async def test_a_request_that_waits_for_its_turn_says_so(
    tmp_path: Path, model: Path, collector: TraceCollector
) -> None:
    async with swarm_of(tmp_path, model, SPANS, max_running_requests=1) as swarm, swarm.connect() as client:
        await asyncio.gather(*(client.generate(PROMPT, **OPTIONS) for _ in range(2)))
        first, second = await ended(collector, 2)
        assert under(collector, first, "queue") == []
        (queued,) = under(collector, second, "queue")
        assert queued.seconds > 0.5 * first.seconds


async def test_turns_show_what_the_router_records_of_them_and_chats_are_called_so(
    tmp_path: Path, model: Path, collector: TraceCollector
) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm, swarm.connect() as client:
        session = (await client.create_session()).session_id
        await client.generate(PROMPT, session=session, **OPTIONS)
        await client.generate("then", session=session, **OPTIONS)
        for request in await ended(collector, 2):
            for method in ("BeginTurn", "EndTurn"):
                assert len(under(collector, request, f"RouterService/{method}")) == 1
        await client.delete_session(session)
        await swarm.until_empty()


async def test_nothing_of_what_was_said_is_in_a_span(tmp_path: Path, model: Path, collector: TraceCollector) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme:a-key-of-many-letters\n")
    client_settings = {"api_keys_file": keys}
    async with (
        Swarm(tmp_path, model, SPANS, client=client_settings, api_key="a-key-of-many-letters") as swarm,
        swarm.connect() as client,
    ):
        session = (await client.create_session()).session_id
        answer = await client.generate(PROMPT, session=session, stop=["tentacle"], **OPTIONS)
        with pytest.raises(ContextLengthExceeded):
            await client.generate(PROMPT * 3000)
        refused = (await ended(collector, 2))[1]
        assert refused.attributes["error.type"] == "CONTEXT_LENGTH_EXCEEDED"
        assert not refused.is_error  # it is the caller's own
        everything = "\n".join(str(each.span) for each in collector.spans)
        said = {*answer.text.split(), *WORDS, "tentacle", "acme", "a-key-of-many-letters", session}
        assert {word for word in said if len(word) > 3 and word in everything} == set()
        await client.delete_session(session)


async def call(swarm: Swarm, metadata: dict[str, str]) -> None:
    """One short answer to a caller that traces."""
    async with grpc.aio.insecure_channel(swarm.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(text="the thin man")
        request.stopping.max_tokens = 2
        await stub.Generate(request, metadata=tuple(metadata.items()))


def callers_headers(*, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{CALLERS_TRACE}-{CALLERS_SPAN}-0{int(sampled)}", "tracestate": "vendor=1"}


async def test_a_caller_neither_chooses_the_trace_nor_whether_there_is_one(tmp_path: Path, model: Path) -> None:
    async with swarm_of(tmp_path, model, SPANS) as swarm:
        with collecting(sampling.ParentBased(sampling.TraceIdRatioBased(0.0))) as collector:
            await call(swarm, callers_headers())
        assert collector.spans == []
        with collecting() as collector:
            await call(swarm, callers_headers(sampled=False))
            (request,) = await ended(collector)
            assert not request.span.parent_span_id
            assert request.span.trace_id.hex() != CALLERS_TRACE
            assert [(each.trace_id.hex(), each.span_id.hex()) for each in request.span.links] == [
                (CALLERS_TRACE, CALLERS_SPAN)
            ]


async def test_a_trusted_callers_trace_goes_on(tmp_path: Path, model: Path) -> None:
    with collecting(sampling.ParentBased(sampling.ALWAYS_OFF)) as collector:
        async with swarm_of(tmp_path, model, SPANS, trace_callers=True) as swarm:
            await call(swarm, callers_headers(sampled=False))
            await call(swarm, {})
            await call(swarm, callers_headers())
            (request,) = await ended(collector)
            assert request.span.parent_span_id.hex() == CALLERS_SPAN
            assert request.span.trace_state == "vendor=1"
            assert {each.span.trace_id.hex() for each in collector.spans} == {CALLERS_TRACE}
            pieces = [each for each in collector.spans if each.server_id]
            assert {each.server_id for each in pieces} == {server.server_id for server in swarm.servers}
            assert {each.span.trace_state for each in pieces} == {"vendor=1"}


@pytest.mark.full
def test_processes_send_the_trace_of_an_answer_that_survived_a_kill(tmp_path: Path, model: Path) -> None:
    """The whole tree, of all processes, over their own exporters."""
    with TraceCollector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-collector-key=secret",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "COROLLA_PRODUCTS": "library",
            "COROLLA_PREFILL_CHUNK_TOKENS": "64",
        }
        options = StackOptions(
            model=str(model),
            blocks="0:2,2:5,2:5",
            log_folder=tmp_path / "logs",
            environment=environment,
            restarts=False,
        )
        with Stack(options) as stack, Client(stack.client_address) as client:
            undisturbed = client.generate(PROMPT, max_tokens=600, ignore_eos=True)
            chunks = client.stream(PROMPT, max_tokens=600, ignore_eos=True)
            token_ids = list(next(chunks).token_ids)
            collector.wait(lambda: len(collector.named("open")) == 2)
            lost = collector.named("open")[1].attributes["corolla.hops"][1].partition(" ")[0]
            stack.kill(next(each.name for each in stack.servers if each.address == lost), signal.SIGKILL)
            for chunk in chunks:
                token_ids += chunk.token_ids
            assert tuple(token_ids) == undisturbed.token_ids
            collector.wait(lambda: len(collector.named("text_completion tiny")) == 2)
            collector.wait(lambda: len(collector.named("recovery")) == 1)
        request = collector.named("text_completion tiny")[1]
        mine = [each for each in collector.spans if each.span.trace_id == request.span.trace_id]
        (recovery,) = [each for each in mine if each.name == "recovery"]
        assert recovery.is_under(request)
        assert recovery.attributes["corolla.lost"] == lost
        assert {each.service for each in mine} == {"corolla-client", "corolla-router", "corolla-block-server"}
        assert len(tree(mine, request).splitlines()) == len(mine)
        assert collector.metadata["x-collector-key"] == "secret"


async def test_a_recovery_that_fails_says_of_what(tmp_path: Path, model: Path, collector: TraceCollector) -> None:
    async with swarm_of(tmp_path, model, SPANS, recovery_patience_s=0.2) as swarm, swarm.connect() as client:
        answering = asyncio.create_task(client.generate(PROMPT, max_tokens=600, ignore_eos=True))
        victim = swarm.servers.pop()
        await until(lambda: victim.sessions)
        await swarm.die(victim)
        with pytest.raises((HopUnavailable, NoChain)) as failed:
            await answering
        (request,) = await ended(collector)
        assert request.attributes["error.type"] == failed.value.reason
        assert request.is_error
        (recovery,) = collector.named("recovery")
        assert recovery.attributes.items() >= {
            "corolla.lost": victim.address, "corolla.cause": "hop_unavailable", "error.type": failed.value.reason,
        }.items()  # fmt: skip
        await swarm.until_empty()
        await victim.stop()
