"""What a token of one stream costs the client service, and the last hop, for vocabularies of different sizes.

    python -m benchmarks.client_token --rounds 7

The model does next to nothing but choose among its tokens: two tiny blocks on one hop. The chains of all vocabularies
run side by side and take turns. The client service should not notice the vocabulary at all; the head grows with it.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_most, figure
from tests.checkpoints import VOCAB_SIZE, make_tiny_checkpoint

_PROMPT_TOKENS = 8
_HOP = "server-1"
_CLIENT = "client"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 151_000, 262_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=300, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    prompt = random_ids(_PROMPT_TOKENS, VOCAB_SIZE, seed=0)
    cpu_us: dict[tuple[str, int], list[float]] = {}

    def microseconds(chain: Chain, vocabulary: int) -> float:
        before = chain.cpu_by_process()
        timing = chain.answer(prompt, options.tokens)
        after = chain.cpu_by_process()
        for process in (_CLIENT, _HOP):
            cpu_us.setdefault((process, vocabulary), []).append(
                1e6 * (after[process] - before[process]) / options.tokens
            )
        return 1e6 / timing.tokens_per_s

    with ExitStack() as exits:
        sides: dict[str, Callable[[], float]] = {}
        for vocabulary in options.vocabularies:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory())) / str(vocabulary)
            make_tiny_checkpoint("llama", folder, num_blocks=2, config_changes={"vocab_size": vocabulary})
            chain = exits.enter_context(Chain(folder, 1))
            sides[f"{vocabulary}"] = partial(microseconds, chain, vocabulary)
        times_us = interleaved(sides, options.rounds)
    for vocabulary in options.vocabularies:
        # The first round warmed up.
        client, hop = (cpu_us[process, vocabulary][1:] for process in (_CLIENT, _HOP))
        name = f"vocabulary of {vocabulary:,}"
        yield figure(f"client service, processor time of a token, {name}", "us", client, at_most(300))
        yield figure(f"last hop, processor time of a token, {name}", "us", hop)
        yield figure(f"a token at the caller, {name}", "us", times_us[f"{vocabulary}"])


if __name__ == "__main__":
    run(__doc__, add_options, measure)
