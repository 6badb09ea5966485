"""What traces cost: the same chain without a collector, and with one that gets 1 %, and all, of the requests.

    python -m benchmarks.tracing --rounds 5

Speed is all tokens over the time from the first request to the last answer; processor time is that of all processes of
the chain. Two chains without a collector show how much of a difference is noise.
"""

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, at_most, figure, ratio
from corolla.models.checkpoint import Checkpoint

_PROMPT_TOKENS = 64
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_OFF, _AGAIN = "off", "off, again"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
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
            name: stack.enter_context(Chain(checkpoint.folder, options.servers, environment=environment))
            for name, environment in environments.items()
        }
        processor_ms: dict[str, list[float]] = {name: [] for name in chains}
        sides: dict[str, Callable[[], float]] = {
            name: partial(_speed, chain, prompts, options.tokens, processor_ms[name]) for name, chain in chains.items()
        }
        speeds = interleaved(sides, options.rounds)
    what = f"{options.streams} streams, {options.servers} hops"
    # Behind the round that warms up.
    processor_ms = {name: each[-options.rounds :] for name, each in processor_ms.items()}
    for name in speeds:
        yield figure(f"{what}, {name}", "tokens/s", speeds[name])
        yield figure(f"{what}, {name}, processor time of a token", "ms", processor_ms[name])
    for name, least, most in ((_AGAIN, None, None), ("1 %", at_least(0.99), at_most(1.01)), ("100 %", None, None)):
        yield ratio(f"{what}, {name} / {_OFF}", speeds[name], speeds[_OFF], least)
        yield ratio(f"{what}, {name} / {_OFF}, processor time", processor_ms[name], processor_ms[_OFF], most)


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
