"""What HTTP costs next to gRPC, and how many event streams one client service bears.

    python -m benchmarks.http --rounds 7

The model does next to nothing: two tiny blocks on one hop. Both doors answer the same prompts of one client service, in
turns. The caller of HTTP reads bytes and nothing else, so that what is measured is the service.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_most, figure
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_PROMPT_TOKENS = 8
_CLIENT = "client"
_GRPC, _HTTP = "gRPC", "HTTP"
_END = b"data: [DONE]\n\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of one answer")
    parser.add_argument("--answers", type=int, default=20, help="short answers of a round, for the first token")
    parser.add_argument("--streams", type=int, default=1000, help="event streams at a time")
    parser.add_argument("--tokens-of-streams", type=int, default=64)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    environment = {
        "COROLLA_MAX_RUNNING_REQUESTS": str(options.streams),
        "COROLLA_MAX_WAITING_REQUESTS": str(options.streams),
        "COROLLA_MAX_BATCH_TOKENS": "1024",
        "COROLLA_MAX_TOKENS_PER_FRAME": "1024",
    }
    cpu_us: dict[str, list[float]] = {_GRPC: [], _HTTP: []}
    first_ms: dict[str, list[float]] = {_GRPC: [], _HTTP: []}
    prompt = random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint("llama", Path(folder) / "tiny", num_blocks=2)
        with Chain(Path(folder) / "tiny", 1, environment=environment) as chain:

            def first_token_s(door: str) -> float:
                if door == _GRPC:
                    return chain.answer(prompt, 2).first_token_s
                first_s: float = chain.run(_first_event_s(chain.http_address, prompt))
                return first_s

            def through(door: str) -> float:
                firsts = sorted(first_token_s(door) for _ in range(options.answers))
                first_ms[door].append(1000 * firsts[len(firsts) // 2])
                before, started_s = chain.cpu_by_process()[_CLIENT], time.perf_counter()
                if door == _GRPC:
                    chain.answer(prompt, options.tokens)
                else:
                    chain.run(_stream(chain.http_address, prompt, options.tokens))
                elapsed_s = time.perf_counter() - started_s
                cpu_us[door].append(1e6 * (chain.cpu_by_process()[_CLIENT] - before) / options.tokens)
                return float(options.tokens) / elapsed_s

            sides: dict[str, Callable[[], float]] = {door: partial(through, door) for door in cpu_us}
            speeds = interleaved(sides, options.rounds)
            idle = chain.resident_bytes()[_CLIENT]
            num_failed, elapsed_s, most = chain.run(_crowd(chain, options.streams, options.tokens_of_streams))
            chain.run(asyncio.sleep(1))
            after = chain.resident_bytes()[_CLIENT]
    for door in cpu_us:
        yield figure(f"one stream, {door}", "tokens/s", speeds[door])
    # The first round warmed up.
    pairs = {kind: list(zip(found[_HTTP][1:], found[_GRPC][1:], strict=True)) for kind, found in
             (("first", first_ms), ("cpu", cpu_us))}  # fmt: skip
    yield figure("first token, gRPC", "ms", first_ms[_GRPC][1:])
    yield figure("first token, HTTP - gRPC", "ms", [http - grpc for http, grpc in pairs["first"]], at_most(2))
    yield figure("client service, processor time of a token, gRPC", "us", cpu_us[_GRPC][1:])
    yield figure(
        "client service, processor time of a token, HTTP - gRPC", "us", [http - grpc for http, grpc in pairs["cpu"]],
        at_most(100),
    )  # fmt: skip
    name = f"{options.streams:,} event streams"
    yield figure(f"{name}, errors", "", [num_failed], at_most(0))
    yield figure(name, "tokens/s", [options.streams * options.tokens_of_streams / elapsed_s])
    yield figure(f"{name}, memory of the client service for each", "KiB", [(most - idle) / 1024 / options.streams])
    yield figure(f"{name}, memory that stays", "MiB", [(after - idle) / (1 << 20)])


def _request(prompt: Sequence[int], num_tokens: int) -> bytes:
    asked = {"prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    # Of a token whose text is a part of a character, too.
    body = json.dumps({**asked, "return_token_ids": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


async def _open(
    address: str, prompt: Sequence[int], num_tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_request(prompt, num_tokens))
    return reader, writer


async def _first_event_s(address: str, prompt: Sequence[int]) -> float:
    started_s = time.perf_counter()
    reader, writer = await _open(address, prompt, 2)
    await reader.readuntil(b"data: ")
    first_s = time.perf_counter() - started_s
    await reader.read()
    writer.close()
    return first_s


async def _stream(address: str, prompt: Sequence[int], num_tokens: int) -> None:
    """Raises RuntimeError: the stream did not come to its end."""
    reader, writer = await _open(address, prompt, num_tokens)
    try:
        text = await reader.read()
    finally:
        writer.close()
    if not text.startswith(b"HTTP/1.1 200 ") or _END not in text:
        raise RuntimeError(text[-500:].decode(errors="replace"))


async def _crowd(chain: Chain, num_streams: int, num_tokens: int) -> tuple[int, float, int]:
    """Streams that failed, how long all took, and the most memory of the client service meanwhile."""
    prompts = [random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed) for seed in range(num_streams)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, (await asyncio.to_thread(chain.resident_bytes))[_CLIENT])
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    started_s = time.perf_counter()
    found = await asyncio.gather(
        *(_stream(chain.http_address, each, num_tokens) for each in prompts), return_exceptions=True
    )
    elapsed_s = time.perf_counter() - started_s
    watching.cancel()
    return sum(each is not None for each in found), elapsed_s, most


if __name__ == "__main__":
    run(__doc__, add_options, measure)
