"""Several streams at once: what a chain gives in all, against one stream and against local transformers' batch of 8.

    python -m benchmarks.streams --rounds 5

Speed is all tokens over the time from the first request to the last answer.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, Target, at_least, figure, ratio
from benchmarks.local_model import LocalModel, unsplit_folder
from corolla.models.checkpoint import Checkpoint

_PROMPT_TOKENS = 16
_LOCAL_BATCH = 8
_TARGETS: dict[tuple[int, int], Target] = {(8, 1): at_least(3.0), (16, 8): at_least(1.0)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one answer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="tried for local transformers")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    local = LocalModel(unsplit_folder(checkpoint))
    prompts = [
        random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(max(*options.streams, _LOCAL_BATCH))
    ]
    num_tokens = options.tokens
    with Chain(options.model, options.servers) as chain:
        sides: dict[str, Callable[[], float]] = {
            f"{count}": partial(speed, chain, prompts[:count], num_tokens) for count in options.streams
        }
        for threads in options.threads:
            sides[f"local/{threads}"] = partial(_speed_of_local, local, prompts[:_LOCAL_BATCH], num_tokens, threads)
        speeds = interleaved(sides, options.rounds)
    hops = f"{options.servers} hops"
    counts = [str(count) for count in options.streams]
    for count in counts:
        yield figure(f"{count} stream{'' if count == '1' else 's'}, {hops}", "tokens/s", speeds[count])
    for threads in options.threads:
        yield figure(f"batch of {_LOCAL_BATCH}, local transformers, {threads} threads", "tokens/s",
                     speeds[f"local/{threads}"])  # fmt: skip
    for (above, below), target in _TARGETS.items():
        if {str(above), str(below)} <= set(counts):
            yield ratio(f"{above} streams / {below}, {hops}", speeds[str(above)], speeds[str(below)], target)
    best = max((f"local/{threads}" for threads in options.threads), key=lambda name: sum(speeds[name]))
    if str(_LOCAL_BATCH) in counts:
        yield ratio(f"{_LOCAL_BATCH} streams, {hops} / local batch of {_LOCAL_BATCH}", speeds[str(_LOCAL_BATCH)],
                    speeds[best], at_least(1.0))  # fmt: skip


def speed(chain: Chain, prompts: list[list[int]], num_tokens: int, **options: Any) -> float:
    """Tokens per second of all streams together. The options are those of `generate`."""
    started_s = time.perf_counter()
    chain.answers(prompts, num_tokens, **options)
    return len(prompts) * num_tokens / (time.perf_counter() - started_s)


def _speed_of_local(local: LocalModel, prompts: list[list[int]], num_tokens: int, num_threads: int) -> float:
    return len(prompts) * num_tokens / local.batch_s(prompts, num_tokens, num_threads)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
