"""What certificates and encryption cost: the same chain with them and in the clear.

    python -m benchmarks.encryption --rounds 5

Speed is all tokens over the time from the first request to the last answer.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from benchmarks.streams import speed
from corolla.models.checkpoint import Checkpoint

_PROMPT_TOKENS = 16
_LEAST_RATIO = 0.95
_CLEAR, _ENCRYPTED = "in the clear", "encrypted"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    prompts = [random_ids(_PROMPT_TOKENS, checkpoint.vocab_size, seed) for seed in range(max(options.streams))]
    with ExitStack() as stack:
        chains = {
            name: stack.enter_context(Chain(options.model, options.servers, is_secure=name == _ENCRYPTED))
            for name in (_CLEAR, _ENCRYPTED)
        }
        sides: dict[str, Callable[[], float]] = {
            f"{count} {name}": partial(speed, chain, prompts[:count], options.tokens)
            for count in options.streams
            for name, chain in chains.items()
        }
        speeds = interleaved(sides, options.rounds)
    for count in options.streams:
        what = f"{count} stream{'' if count == 1 else 's'}, {options.servers} hops"
        for name in chains:
            yield figure(f"{what}, {name}", "tokens/s", speeds[f"{count} {name}"])
        yield ratio(
            f"{what}, {_ENCRYPTED} / {_CLEAR}", speeds[f"{count} {_ENCRYPTED}"], speeds[f"{count} {_CLEAR}"],
            at_least(_LEAST_RATIO),
        )  # fmt: skip


if __name__ == "__main__":
    run(__doc__, add_options, measure)
