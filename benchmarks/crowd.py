"""Very many streams of a model that does next to nothing: how many tokens a second a chain passes on in all.

    python -m benchmarks.crowd --streams 64 256 1000

Two hops of one tiny block each. All streams begin at once and have equally many tokens; their caller runs on the same
processors. What counts is all tokens over the time from the first request to the last answer.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, at_most, figure
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_PROMPT_TOKENS = 8
_TARGETS = {64: 5000, 256: 6000, 1000: 6000}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    most = max(options.streams)
    environment = {
        "COROLLA_MAX_RUNNING_REQUESTS": str(most),
        "COROLLA_MAX_WAITING_REQUESTS": str(most),
        "COROLLA_MAX_BATCH_TOKENS": "1024",
    }
    errors: dict[int, list[float]] = {count: [] for count in options.streams}
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint("llama", Path(folder) / "tiny", num_blocks=options.servers)
        with Chain(Path(folder) / "tiny", options.servers, environment=environment) as chain:
            sides: dict[str, Callable[[], float]] = {
                str(count): partial(_tokens_per_s, chain, count, options.tokens, errors[count])
                for count in options.streams
            }
            speeds = interleaved(sides, options.rounds)
    for count in options.streams:
        target = _TARGETS.get(count)
        yield figure(
            f"{count} streams, {options.servers} hops", "tokens/s", speeds[str(count)],
            at_least(target) if target else None,
        )  # fmt: skip
        yield figure(f"{count} streams, {options.servers} hops, errors", "", errors[count], at_most(0))


def _tokens_per_s(chain: Chain, num_streams: int, num_tokens: int, errors: list[float]) -> float:
    prompts = [random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed) for seed in range(num_streams)]

    async def ask() -> list[object]:
        return list(await asyncio.gather(*(chain.timed(each, num_tokens) for each in prompts), return_exceptions=True))

    started_s = time.perf_counter()
    answers: list[object] = chain.run(ask())
    elapsed_s = time.perf_counter() - started_s
    num_failed = sum(isinstance(answer, BaseException) for answer in answers)
    errors.append(num_failed)
    return (num_streams - num_failed) * num_tokens / elapsed_s


if __name__ == "__main__":
    run(__doc__, add_options, measure)
