"""Processor time of four streams through a chain, against a local batch of four.

    python -m benchmarks.microbatches --rounds 7

The chain's time is that of all its processes, router and Redis too; the caller's process is left out. Both sides
compute with one thread a process, so no thread spins.
"""

import argparse
from collections.abc import Iterator

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_most, figure, ratio
from benchmarks.local_model import LocalModel, unsplit_folder
from corolla.models.checkpoint import Checkpoint

_NUM_ROWS = 4
_PROMPT_TOKENS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(_NUM_ROWS)]
    num_tokens: int = options.tokens
    num_all = _NUM_ROWS * num_tokens
    local = LocalModel(unsplit_folder(checkpoint))
    with Chain(options.model, options.servers) as chain:

        def of_chain() -> float:
            before_s = chain.cpu_s()
            chain.answers(prompts, num_tokens)
            return 1000 * (chain.cpu_s() - before_s) / num_all

        def of_local() -> float:
            return 1000 * local.batch_cpu_s(prompts, num_tokens) / num_all

        times_ms = interleaved({"chain": of_chain, "local": of_local}, options.rounds)
    hops = f"{options.servers} hops"
    yield figure(f"processor time of a token, {_NUM_ROWS} streams, {hops}", "ms", times_ms["chain"])
    yield figure(f"processor time of a token, local batch of {_NUM_ROWS}", "ms", times_ms["local"])
    yield ratio(f"processor time, {_NUM_ROWS} streams, {hops} / local batch of {_NUM_ROWS}", times_ms["chain"],
                times_ms["local"], at_most(1.2))  # fmt: skip


if __name__ == "__main__":
    run(__doc__, add_options, measure)
