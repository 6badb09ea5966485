"""A chain of two hops against vLLM's build for CPUs: one stream, several at once, and first tokens of long prompts.

    VLLM_PYTHON=/path/to/python python -m benchmarks.against_vllm --rounds 5

vLLM runs in one process with two threads, eagerly and without its prefix cache; each process of the chain has one
thread, or as many as --threads says. Both decode greedily, ignore end tokens, and get the same ids. Speed is all tokens
over the time from the first request to the last answer; of a first token, its prompt over the time until it is there.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import streams
from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from benchmarks.local_model import unsplit_folder
from benchmarks.piped_process import PipedProcess
from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import DEMO_MODEL

PYTHON_VARIABLE: Final = "VLLM_PYTHON"
_PROCESS: Final = Path(__file__).with_name("vllm_process.py")
_PROMPT_TOKENS = 32
_GOAL: Final = 0.85
_FIRST_TOKEN_GOAL: Final = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="of each block server")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048], help="tokens, before a first one")
    parser.add_argument("--microbatches", type=int, default=0, help="under way at a time; 0: one for each hop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        raise SystemExit(f"{PYTHON_VARIABLE} names no Python that has vllm; benchmarks/README.md says how to get one")
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    most = max(options.streams)
    long_prompts = {count: random_ids(count, checkpoint.vocab_size, count) for count in options.prompts}
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(most)]
    hops = f"{options.servers} hops"
    for dtype in options.dtypes:
        with ExitStack() as exits:
            # The chain's prefix cache is off, and so is vLLM's.
            settings = {"COROLLA_MAX_MICROBATCHES": str(options.microbatches), "COROLLA_PREFIX_CACHE": "false"}
            chain = exits.enter_context(
                Chain(options.model, options.servers, dtype=dtype, num_threads=options.threads, environment=settings)
            )
            vllm = exits.enter_context(_vllm(python, unsplit_folder(checkpoint), dtype, most))
            sides: dict[str, Callable[[], float]] = {}
            for count in options.streams:
                sides[f"chain/{count}"] = partial(streams.speed, chain, prompts[:count], options.tokens)
                sides[f"unsplit/{count}"] = partial(_speed, vllm, prompts[:count], options.tokens)
            for count, prompt in long_prompts.items():
                sides[f"chain/first of {count}"] = partial(_first_token_speed, chain, prompt)
                sides[f"unsplit/first of {count}"] = partial(_speed, vllm, [prompt], 1, count)
            speeds = interleaved(sides, options.rounds)
        kinds = [(str(n), f"{n} stream{'' if n == 1 else 's'}, {dtype}", _GOAL) for n in options.streams]
        kinds += [(f"first of {n}", f"first token of {n}, {dtype}", _FIRST_TOKEN_GOAL) for n in long_prompts]
        for kind, what, goal in kinds:
            yield figure(f"{what}, vLLM", "tokens/s", speeds[f"unsplit/{kind}"])
            side, own = f"{what}, {hops}", speeds[f"chain/{kind}"]
            yield figure(side, "tokens/s", own)
            yield ratio(f"{side} / vLLM", own, speeds[f"unsplit/{kind}"], at_least(goal))


def _vllm(python: str, folder: Path, dtype: str, most_streams: int) -> PipedProcess:
    command = [python, "-P", str(_PROCESS), str(folder), dtype, str(most_streams)]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return PipedProcess(command, {**own, **settings})


def _first_token_speed(chain: Chain, prompt: list[int]) -> float:
    return len(prompt) / chain.answer(prompt, 1).first_token_s


def _speed(vllm: PipedProcess, prompts: list[list[int]], num_tokens: int, num_counted: int = 0) -> float:
    seconds: float = vllm.ask({"prompts": prompts, "num_tokens": num_tokens})
    return (num_counted or len(prompts) * num_tokens) / seconds


if __name__ == "__main__":
    run(__doc__, add_options, measure)
