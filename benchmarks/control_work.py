"""How long a running stream waits for what a chain does apart from it: openings, metrics, status, health.

    python -m benchmarks.control_work --rounds 9

One stream of a model that does next to nothing goes over two hops, alone and while another process opens and closes
sessions all the time (each with a prompt of a few tokens and one new token), asks block servers for health and status,
and scrapes their metrics. What counts is the time between two tokens at the caller.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_most, figure, percentile
from corolla.chassis.channels import open_channel
from corolla.local.processes import ManagedProcess
from corolla.sdk.async_client import AsyncClient
from corolla.v1 import blocks_pb2, blocks_pb2_grpc
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_PROMPT_TOKENS = 8
_PERCENTS = (50, 99)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of one answer")
    parser.add_argument("--openings", type=float, default=20, help="sessions opened and closed each second")
    parser.add_argument("--questions", type=float, default=5, help="of health, status and metrics each, each second")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    # By side and percentile: microseconds between two tokens, round by round.
    gaps_us: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint("llama", Path(folder) / "tiny", num_blocks=2)
        with Chain(Path(folder) / "tiny", 2) as chain:
            spawning = multiprocessing.get_context("spawn")
            is_wanted = spawning.Event()
            worker = spawning.Process(
                target=_work,
                args=(chain.client_address, chain.servers, options.openings, options.questions, is_wanted),
                daemon=True,
            )
            worker.start()

            def answer(side: str) -> float:
                (is_wanted.set if side == "loaded" else is_wanted.clear)()
                timing = chain.answer(random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=0), options.tokens)
                for percent in _PERCENTS:
                    gaps_us.setdefault((side, percent), []).append(1e6 * percentile(timing.gaps_s, percent))
                return timing.total_s

            interleaved({side: partial(answer, side) for side in ("alone", "loaded")}, options.rounds)
            worker.terminate()
    for percent in _PERCENTS:
        # The first round warmed up.
        alone, loaded = gaps_us["alone", percent][1:], gaps_us["loaded", percent][1:]
        delays = [later - sooner for sooner, later in zip(alone, loaded, strict=True)]
        yield figure(f"between two tokens, alone, p{percent}", "us", alone)
        yield figure(f"between two tokens, with control work, p{percent}", "us", loaded)
        yield figure(
            f"delay by control work, p{percent}", "us", delays, at_most(1000) if percent == 99 else None
        )  # fmt: skip


def _work(address: str, servers: Sequence[ManagedProcess], openings: float, questions: float, is_wanted: Event) -> None:
    """A process of its own: what it computes delays no stamp of the benchmark's."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_work_on(address, servers, openings, questions, is_wanted))


async def _work_on(
    address: str, servers: Sequence[ManagedProcess], openings: float, questions: float, is_wanted: Event
) -> None:
    prompt = random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=1)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(address))
        acts: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (openings, partial(client.generate, prompt, max_tokens=1))
        ]
        for server in servers:
            channel = await stack.enter_async_context(open_channel(server.rpc_address))
            blocks: blocks_pb2_grpc.BlockServiceAsyncStub = blocks_pb2_grpc.BlockServiceStub(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)
            acts += [
                (questions, partial(blocks.GetStatus, blocks_pb2.GetBlockServerStatusRequest())),
                (questions, partial(health.Check, health_pb2.HealthCheckRequest())),
                (questions, partial(asyncio.to_thread, _scrape, f"http://127.0.0.1:{server.metrics_port}/metrics")),
            ]
        await asyncio.gather(*(_repeat(rate, act, is_wanted) for rate, act in acts))


async def _repeat(rate: float, act: Callable[[], Awaitable[object]], is_wanted: Event) -> None:
    while True:
        await asyncio.sleep(1 / rate)
        if is_wanted.is_set():
            await act()


def _scrape(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    run(__doc__, add_options, measure)
