"""What it costs that answers have a form: streams whose answers are JSON of a schema, and the same streams without one.

    python -m benchmarks.formats --rounds 5

Speed is all tokens over the time from the first request to the last answer. No answer can end before its last token.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.chain import Chain
from benchmarks.command import interleaved, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from corolla.models.checkpoint import Checkpoint

_PROMPT_TOKENS = 16
_LEAST_RATIO = 0.95
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_member": {"type": "boolean"},
        "kind": {"enum": ["friend", "colleague", "neighbour"]},
    },
    "required": ["name", "age", "is_member", "kind"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _PERSON, "minItems": 1000}
_FORMED = {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}}
_SIDES: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "of a form": _FORMED}


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
    with Chain(options.model, options.servers) as chain:
        # The first one has the tokenizer read on both sides.
        _speed(chain, prompts[:1], 2, _FORMED)
        sides: dict[str, Callable[[], float]] = {
            f"{count} {name}": partial(_speed, chain, prompts[:count], options.tokens, given)
            for count in options.streams
            for name, given in _SIDES.items()
        }
        speeds = interleaved(sides, options.rounds)
    for count in options.streams:
        what = f"{count} stream{'' if count == 1 else 's'}, {options.servers} hops"
        for name in _SIDES:
            yield figure(f"{what}, {name}", "tokens/s", speeds[f"{count} {name}"])
        yield ratio(
            f"{what}, of a form / free", speeds[f"{count} of a form"], speeds[f"{count} free"], at_least(_LEAST_RATIO)
        )


def _speed(chain: Chain, prompts: Sequence[Sequence[int]], num_tokens: int, given: dict[str, Any]) -> float:
    """Tokens per second of all streams together."""

    async def ask(prompt: Sequence[int]) -> None:
        answer = await chain.client.generate(list(prompt), max_tokens=num_tokens, **given)
        assert len(answer.token_ids) == num_tokens

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, prompts))

    started_s = time.perf_counter()
    chain.run(ask_all())
    return len(prompts) * num_tokens / (time.perf_counter() - started_s)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
