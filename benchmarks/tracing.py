"""What traces cost: the same chain without a collector, and with one that gets 1 %, and all, of the requests.

    python -m benchmarks.tracing --rounds 5

Speed is all tokens over the time from the first request to the last answer; processor time is that of all processes of
the chain. Two chains without a collector show how much of a difference is noise. What a hop and a request pay by
themselves is measured in this process, by the clock of its thread.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import grpc
from opentelemetry.sdk.trace import TracerProvider, sampling

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, at_most, figure, ratio
from corolla.block_server.hop_session import HopSession, OpenRequest
from corolla.block_server.row_sampling import ChosenTokens
from corolla.block_server.step_admission import AdmittedStep, StepWork
from corolla.block_server.step_spans import StepSpans
from corolla.chassis.tracing import spans
from corolla.chassis.tracing.carriers import TraceParent, trace_parent
from corolla.models.checkpoint import Checkpoint
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.span import Span

_PROMPT_TOKENS = 64
_ROWS = 8
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_OFF, _AGAIN = "off", "off, again"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(options.streams)]
    with ExitStack() as stack:
        collector = stack.enter_context(_collector())
        environments: dict[str, dict[str, str]] = {
            _OFF: {}, _AGAIN: {}, "1 %": _traced(collector, 0.01), "100 %": _traced(collector, 1.0),
        }  # fmt: skip
        chains = {
            name: stack.enter_context(Chain(options.model, options.servers, environment=environment))
            for name, environment in environments.items()
        }
        processor_ms: dict[str, list[float]] = {name: [] for name in chains}
        sides: dict[str, Callable[[], float]] = {
            name: partial(_speed, chain, prompts, options.tokens, processor_ms[name]) for name, chain in chains.items()
        }
        speeds = interleaved(sides, options.rounds)
    yield from _parts()
    what = f"{options.streams} streams, {options.servers} hops"
    # Behind the round that warms up.
    processor_ms = {name: each[-options.rounds :] for name, each in processor_ms.items()}
    for name in speeds:
        yield figure(f"{what}, {name}", "tokens/s", speeds[name])
        yield figure(f"{what}, {name}, processor time of a token", "ms", processor_ms[name])
    for name, least, most in ((_AGAIN, None, None), ("1 %", at_least(0.99), at_most(1.01)), ("100 %", None, None)):
        yield ratio(f"{what}, {name} / {_OFF}", speeds[name], speeds[_OFF], least)
        yield ratio(f"{what}, {name} / {_OFF}, processor time", processor_ms[name], processor_ms[_OFF], most)


def _parts() -> Iterator[Figure]:
    """What a hop does after an iteration of 8 decode steps, and a client service for a request."""
    rows = [pb.StepRow(session_id=bytes(16), epoch=1, position=95, num_tokens=1, num_result_tokens=1)] * _ROWS
    step, outputs = pb.Step(rows=rows, samples=True), [ChosenTokens()] * _ROWS
    parent = trace_parent({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})

    def admitted(trace: TraceParent | None, num_rows: int) -> list[AdmittedStep]:
        request = OpenRequest(bytes(16), 1, "", bytes(16), False, 128, Span(0, 2), 60.0, False, trace=trace)
        session: Any = HopSession(request, cast(Any, None))
        return [AdmittedStep(StepWork(step, b"", None), [(row, session, 0) for row in step.rows[:num_rows]])]

    def request() -> None:
        with spans.request("request", None, trusts_caller=False), spans.span("open"), spans.span("prefill"):
            pass

    hop = StepSpans("a" * 32, "127.0.0.1:1")
    plain, traced = admitted(None, _ROWS), admitted(parent, 1)
    yield figure("a request and two spans of it, off", "us", _thread_us(request))
    provider = TracerProvider(sampling.ALWAYS_ON, shutdown_on_exit=False)
    spans.use(provider.get_tracer("benchmark"))
    yield figure(f"a hop, {_ROWS} rows that are not traced", "us", _thread_us(lambda: hop.record(plain, outputs, 1e-3)))
    yield figure("a hop, a span of a decode step, of which one in 32 has one", "us",
                 _thread_us(lambda: hop.record(traced, outputs, 1e-3)))  # fmt: skip
    yield figure("a request and two spans of it, sampled", "us", _thread_us(request))
    spans.use(None)


def _thread_us(work: Callable[[], None], num_times: int = 2000, num_rounds: int = 7) -> list[float]:
    found = []
    for _ in range(num_rounds):
        began_s = time.thread_time()
        for _ in range(num_times):
            work()
        found.append((time.thread_time() - began_s) / num_times * 1e6)
    return found


def _speed(chain: Chain, prompts: list[list[int]], num_tokens: int, processor_ms: list[float]) -> float:
    """Tokens/s of all together; notes the processor time of one."""
    began_s = chain.cpu_s()
    timings = chain.answers(prompts, num_tokens)
    processor_ms.append((chain.cpu_s() - began_s) * 1000 / (len(prompts) * num_tokens))
    seconds = max(each.stamps_s[-1] for each in timings) - min(each.started_s for each in timings)
    return len(prompts) * num_tokens / seconds


def _traced(collector: str, share: float) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(share),
    }


@contextmanager
def _collector() -> Iterator[str]:
    """The address of one that takes spans and forgets them."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            return (
                grpc.unary_unary_rpc_method_handler(lambda spans, context: b"") if details.method == _EXPORT else None
            )

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
