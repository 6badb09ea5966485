"""A GGUF file that stays packed: memory, perplexity and prompts against expanded weights, speed against llama.cpp.

    python -m benchmarks.packed --model ./model.gguf

Memory is that of all blocks, as `benchmarks.loading` measures it. llama.cpp takes part where a Python has it:
LLAMA_CPP_PYTHON=/path/to/python. Each side has as many threads as the other: a chain of two hops one for each hop,
llama.cpp two.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.chain import Chain
from benchmarks.command import interleaved, progress, random_ids, run
from benchmarks.figures import Figure, at_least, at_most, figure, ratio
from benchmarks.llama import LlamaCpp, demo_as, find_python
from benchmarks.loading import loading
from benchmarks.local_blocks import LocalBlocks
from benchmarks.quality import PASSAGE, perplexity
from corolla.chassis.weight_formats import PACKED
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint

_PROMPT_TOKENS = 16
_LEAST_OF_LLAMA = {1: at_least(0.6), 8: at_least(0.8)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="demo", help="a GGUF file; demo is that of the package, demo-q8_0 one of Q8_0 made from it"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--servers", type=int, default=2, help="hops, and threads of llama.cpp")
    parser.add_argument("--threads", type=int, default=1, help="of each block server")
    parser.add_argument("--microbatches", type=int, default=0, help="under way at a time; 0: one for each hop")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one answer")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt that is timed")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    named: dict[str, Callable[[], Path]] = {"demo": demo_checkpoint, "demo-q8_0": partial(demo_as, "Q8_0")}
    path = named.get(options.model, lambda: Path(options.model))()
    checkpoint = Checkpoint.from_pretrained(str(path))
    for dtype in options.dtypes:
        blocks = f"blocks 0:{checkpoint.num_blocks}"
        yield from loading(f"packed/{dtype}, {blocks}", str(path), blocks, dtype, quantization=PACKED)
    yield from _against_expanded(checkpoint, options)
    yield from _against_llama(path, checkpoint, options)


def _against_expanded(checkpoint: Checkpoint, options: argparse.Namespace) -> Iterator[Figure]:
    library: Any = AutoTokenizer
    token_ids = library.from_pretrained(checkpoint.folder).encode(PASSAGE.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    names = list(
        dict.fromkeys(["none/float32", *(f"{kind}/{each}" for each in options.dtypes for kind in ("none", "packed"))])
    )
    loaded = {}
    for name in names:
        quantization, _, dtype = name.partition("/")
        progress(f"loading {name}")
        loaded[name] = LocalBlocks(checkpoint, dtype, quantization)
    of_expanded = perplexity(loaded["none/float32"], token_ids)
    yield figure(f"none/float32, perplexity over {len(token_ids)} tokens", "", [of_expanded])
    for dtype in options.dtypes:
        found = perplexity(loaded[f"packed/{dtype}"], token_ids)
        yield figure(f"packed/{dtype}, perplexity / none/float32", "x", [found / of_expanded], at_most(1.005))
    prompt = random_ids(options.prompt, checkpoint.vocab_size, seed=0)

    def prompts_per_s(name: str) -> float:
        started_s = time.perf_counter()
        loaded[name].answer(prompt, 1)
        return 1 / (time.perf_counter() - started_s)

    speeds = interleaved({name: partial(prompts_per_s, name) for name in names}, options.rounds)
    for dtype in options.dtypes:
        what = f"prompt of {options.prompt}, one thread, packed/{dtype} / none/{dtype}"
        yield ratio(what, speeds[f"packed/{dtype}"], speeds[f"none/{dtype}"], at_least(1.0))


def _against_llama(path: Path, checkpoint: Checkpoint, options: argparse.Namespace) -> Iterator[Figure]:
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(max(options.streams))]
    with ExitStack() as exits:
        sides: dict[str, Callable[[], float]] = {}
        for dtype in options.dtypes:
            chain = exits.enter_context(
                Chain(
                    path, options.servers, dtype=dtype, quantization="packed", num_threads=options.threads,
                    environment={"COROLLA_MAX_MICROBATCHES": str(options.microbatches)},
                )
            )  # fmt: skip
            for count in options.streams:
                sides[f"packed/{dtype} {count}"] = partial(_speed_of_chain, chain, prompts[:count], options.tokens)
        if (python := find_python()) is not None:
            llama = exits.enter_context(LlamaCpp(python, options.servers, path))
            for count in options.streams:
                sides[f"llama.cpp {count}"] = partial(_speed_of_llama, llama, prompts[:count], options.tokens)
        speeds = interleaved(sides, options.rounds)
    for name, rounds in speeds.items():
        side, _, count = name.rpartition(" ")
        yield figure(f"{_streams(int(count))}, {side}", "tokens/s", rounds)
    for count in options.streams if python is not None else ():
        for dtype in options.dtypes:
            what = f"{_streams(count)}, {options.servers} hops, packed/{dtype} / llama.cpp"
            yield ratio(
                what, speeds[f"packed/{dtype} {count}"], speeds[f"llama.cpp {count}"], _LEAST_OF_LLAMA.get(count)
            )


def _streams(count: int) -> str:
    return f"{count} stream{'' if count == 1 else 's'}"


def _speed_of_chain(chain: Chain, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens of all streams after the first ones, over the time after the first one."""
    timings = chain.answers(prompts, num_tokens)
    seconds = max(each.stamps_s[-1] for each in timings) - min(each.stamps_s[0] for each in timings)
    return len(prompts) * (num_tokens - 1) / seconds


def _speed_of_llama(llama: LlamaCpp, prompts: list[list[int]], num_tokens: int) -> float:
    return len(prompts) * llama.answers(prompts, num_tokens).tokens_per_s


if __name__ == "__main__":
    run(__doc__, add_options, measure)
