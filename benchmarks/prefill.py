"""Time to the first token of long prompts, by the number of hops, against local transformers.

    python -m benchmarks.prefill --lengths 128 512 2048 4096 --hops 1 2 3 4

Every prompt is new, so no prefix is ever reused. The ratio says how many times faster the chain is.
"""

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from benchmarks.local_model import LocalModel, unsplit_folder
from corolla.models.checkpoint import Checkpoint

_TARGETS = {(2, 512): at_least(1.0)}
# Long prompts need fewer rounds: their time is large beside any disturbance.
_WHOLE_ROUNDS_TOKENS = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 4096], help="tokens of the prompts")
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="tried for local transformers")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    local = LocalModel(unsplit_folder(checkpoint))
    seeds = itertools.count(1)

    def prompt(length: int) -> list[int]:
        return random_ids(length, checkpoint.vocab_size, next(seeds))

    def of_local(length: int, threads: int) -> float:
        return local.answer(prompt(length), 1, threads).first_token_s

    def of_chain(chain: Chain, length: int) -> float:
        return chain.answer(prompt(length), 1).first_token_s

    for hops in options.hops:
        with Chain(options.model, hops) as chain:
            for length in options.lengths:
                rounds = max(1, options.rounds * _WHOLE_ROUNDS_TOKENS // max(length, _WHOLE_ROUNDS_TOKENS))
                sides = {f"local/{threads}": partial(of_local, length, threads) for threads in options.threads}
                times_s = interleaved({"chain": partial(of_chain, chain, length), **sides}, rounds)
                best = min(sides, key=lambda name: sum(times_s[name]))
                what = f"first token of {length}"
                yield figure(f"{what}, {hops} hops", "s", times_s["chain"])
                yield figure(f"{what}, local transformers", "s", times_s[best])
                yield ratio(f"{what}, {hops} hops, times faster than local", times_s[best], times_s["chain"],
                            _TARGETS.get((hops, length)))  # fmt: skip


if __name__ == "__main__":
    run(__doc__, add_options, measure)
