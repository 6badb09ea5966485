"""Many streams whose tokens are drawn at temperature 1, with and without a filter, beside as many greedy streams.

    python -m benchmarks.draws --rounds 5

Speed is all tokens over the time from the first request to the last answer.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, Target, at_least, figure, ratio
from benchmarks.streams import speed
from corolla.models.checkpoint import Checkpoint

_PROMPT_TOKENS: Final = 16
_GREEDY: Final = "greedy"
_WAYS: Final[dict[str, tuple[dict[str, Any], Target | None]]] = {
    _GREEDY: ({"temperature": 0.0}, None),
    "top-p 0.95": ({"temperature": 1.0, "top_p": 0.95}, at_least(0.97)),
    "unfiltered": ({"temperature": 1.0}, at_least(0.9)),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one answer")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    vocab_size = Checkpoint.from_pretrained(options.model).vocab_size
    prompts = [random_ids(_PROMPT_TOKENS, vocab_size, seed) for seed in range(options.streams)]
    environment = {"COROLLA_MAX_RUNNING_REQUESTS": str(options.streams)}
    with Chain(options.model, options.servers, environment=environment) as chain:
        sides: dict[str, Callable[[], float]] = {
            name: partial(speed, chain, prompts, options.tokens, **parameters)
            for name, (parameters, _) in _WAYS.items()
        }
        speeds = interleaved(sides, options.rounds)
    for name, (_, target) in _WAYS.items():
        yield figure(f"{options.streams} streams, {name}", "tokens/s", speeds[name])
        if name != _GREEDY:
            yield ratio(f"{options.streams} streams, {name} / {_GREEDY}", speeds[name], speeds[_GREEDY], target)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
