"""A second prompt that begins as an earlier one: its time to the first token against the first's.

python -m benchmarks.prefix --rounds 9
"""

import argparse
from collections.abc import Iterator

from benchmarks.chain import Chain
from benchmarks.command import progress, random_ids, run
from benchmarks.figures import Figure, at_most, figure, ratio
from corolla.models.checkpoint import Checkpoint

_OWN_TOKENS = 8


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--prefix-tokens", type=int, default=512, help="that both prompts begin with")
    parser.add_argument("--rounds", type=int, default=9)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    vocab_size, num_tokens = checkpoint.vocab_size, options.prefix_tokens
    times_s: tuple[list[float], list[float]] = ([], [])
    with Chain(options.model, options.servers) as chain:
        chain.answer(random_ids(num_tokens, vocab_size, seed=0), 1)
        for number in range(1, options.rounds + 1):
            progress(f"round {number} of {options.rounds}")
            prefix = random_ids(num_tokens, vocab_size, seed=number)
            for which, seen in enumerate(times_s):
                own = random_ids(_OWN_TOKENS, vocab_size, seed=1000 * number + which)
                seen.append(chain.answer([*prefix, *own], 1).first_token_s)
    progress("")
    first, second = times_s
    yield figure(f"first token after a new prefix of {num_tokens}", "s", first)
    yield figure(f"first token after the same prefix of {num_tokens} again", "s", second)
    yield ratio(f"first token, prefix of {num_tokens} again / new", second, first, at_most(0.25))


if __name__ == "__main__":
    run(__doc__, add_options, measure)
