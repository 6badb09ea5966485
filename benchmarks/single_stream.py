"""One stream: a chain of processes against local transformers, the same blocks in one process, and llama.cpp.

    python -m benchmarks.single_stream --rounds 15

Answers of a few tokens take turns, in changing order, so that a noisy machine is equally unkind to all. Every side
runs with one thread and with two, and counts with the faster of the two. Speed is tokens after the first over the time
after the first. llama.cpp takes part where a Python has it: LLAMA_CPP_PYTHON=/path/to/python.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, percentile, ratio
from benchmarks.llama import LlamaCpp, find_python
from benchmarks.local_blocks import LocalBlocks
from benchmarks.local_model import LocalModel, unsplit_folder
from benchmarks.timing import Timing
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import DEMO_MODEL

_PROMPT_TOKENS = 16


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of one answer")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="tried for the sides in one process")
    parser.add_argument("--chain-threads", type=int, nargs="+", default=[1], help="of each process, one chain for each")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    prompt = random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed=0)
    gaps_s: list[float] = []
    with ExitStack() as exits:
        sides: dict[str, Callable[[], float]] = {}
        for threads in options.chain_threads:
            chain = exits.enter_context(Chain(options.model, options.servers, num_threads=threads))
            sides[f"chain/{threads}"] = partial(_speed_of_chain, chain, prompt, options.tokens, gaps_s)
        local, blocks = LocalModel(unsplit_folder(checkpoint)), LocalBlocks(checkpoint)
        python = find_python() if options.model == DEMO_MODEL else None
        for threads in options.threads:
            sides[f"local/{threads}"] = partial(_speed, partial(local.answer, prompt, options.tokens, threads))
            sides[f"blocks/{threads}"] = partial(_speed, partial(blocks.answer, prompt, options.tokens, threads))
            if python is not None:
                llama = exits.enter_context(LlamaCpp(python, threads))
                sides[f"llama.cpp/{threads}"] = partial(_speed, partial(llama.answer, prompt, options.tokens))
        speeds = interleaved(sides, options.rounds)
    chain_name, local_name, blocks_name = (_best(speeds, side) for side in ("chain", "local", "blocks"))
    hops = f"{options.servers} hops"
    for name, rounds in speeds.items():
        yield figure(f"one stream, {_in_words(name, hops)}", "tokens/s", rounds)
    yield figure(f"one stream, {hops}, between tokens, p50", "ms", [1000 * percentile(gaps_s, 50)])
    yield figure(f"one stream, {hops}, between tokens, p99", "ms", [1000 * percentile(gaps_s, 99)])
    yield ratio(f"one stream, {hops} / local transformers", speeds[chain_name], speeds[local_name], at_least(1.05))
    yield ratio(f"one stream, {hops} / same blocks in one process", speeds[chain_name], speeds[blocks_name],
                at_least(0.94))  # fmt: skip
    if python is not None:
        yield ratio(f"one stream, {hops} / llama.cpp f16", speeds[chain_name], speeds[_best(speeds, "llama.cpp")],
                    at_least(0.35))  # fmt: skip


def _speed(answer: Callable[[], Timing]) -> float:
    return answer().tokens_per_s


def _speed_of_chain(chain: Chain, prompt: list[int], num_tokens: int, gaps_s: list[float]) -> float:
    timing = chain.answer(prompt, num_tokens)
    gaps_s += timing.gaps_s
    return timing.tokens_per_s


def _best(speeds: dict[str, list[float]], side: str) -> str:
    """The thread count of a side that was fastest over all rounds."""
    names = [name for name in speeds if name.startswith(f"{side}/")]
    return max(names, key=lambda name: sorted(speeds[name])[len(speeds[name]) // 2])


def _in_words(name: str, hops: str) -> str:
    side, _, threads = name.partition("/")
    what = {"chain": hops, "local": "local transformers", "blocks": "same blocks in one process"}.get(
        side, f"{side} f16"
    )
    return f"{what}, {threads} thread{'' if threads == '1' else 's'}"


if __name__ == "__main__":
    run(__doc__, add_options, measure)
