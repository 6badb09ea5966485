"""What callers of a chain on one device see: streams, first tokens, hops, sampling, and equal answers in company."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.chain import Chain
from benchmarks.command import random_ids
from benchmarks.figures import Figure, at_least, at_most, figure, ratio
from benchmarks.timing import Timing
from corolla.models.checkpoint import Checkpoint

_SAMPLED: Final[Mapping[str, Any]] = {
    "temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.1, "seed": 1,
}  # fmt: skip
# Tokens per second of 8B in bfloat16 on one H100, with prompts of 128 tokens.
_STEADY: Final = {1: 150.0, 8: 1050.0, 32: 3600.0, 64: 6000.0}
_WITH_PROMPTS: Final = {64: 4500.0}
_FIRST_TOKEN_MS: Final = {512: 30.0, 2048: 90.0, 8000: 350.0}


@dataclass(frozen=True, slots=True)
class Suite:
    """A model on a device.

    Attributes:
        folder: its checkpoint.
        options: of `benchmarks.gpu`.
        weight_bytes: what one token reads.
        bandwidth: bytes per second of a large copy, read and written.
    """

    folder: Path
    options: argparse.Namespace
    weight_bytes: int
    bandwidth: float

    def chain(self, hops: int) -> Chain:
        environment = {
            "COROLLA_DEVICE": self.options.device,
            "COROLLA_KV_CACHE_MIB": str(self.options.kv_cache_mib),
            "COROLLA_PAGE_TOKENS": str(self.options.page_tokens),
        }
        return Chain(
            self.folder, hops, dtype=self.options.dtype, quantization=self.options.quantization, environment=environment
        )

    def prompts(self, count: int, num_tokens: int, seed: int) -> list[list[int]]:
        """Prompts that nothing has seen before."""
        vocab_size = Checkpoint.from_pretrained(str(self.folder)).vocab_size
        return [random_ids(num_tokens, vocab_size, 10_000 * seed + number) for number in range(count)]


def streams(suite: Suite) -> Iterator[Figure]:
    """Tokens per second once all prompts are in, and with the time of the prompts."""
    with suite.chain(1) as chain:
        for count in suite.options.streams:
            steady, whole = [], []
            for seed in range(suite.options.rounds + 1):
                timings = chain.answers(suite.prompts(count, 128, seed), suite.options.tokens)
                steady.append(count / _token_s(timings))
                began, ended = min(each.started_s for each in timings), max(each.stamps_s[-1] for each in timings)
                whole.append(count * suite.options.tokens / (ended - began))
            target = at_least(_STEADY[count]) if count in _STEADY else None
            yield figure(f"{count} streams, steady", "tokens/s", steady[1:], target)
            used = [each / count * suite.weight_bytes / suite.bandwidth for each in steady[1:]]
            yield figure(f"{count} streams, fraction of the bandwidth roofline", "", used)
            target = at_least(_WITH_PROMPTS[count]) if count in _WITH_PROMPTS else None
            yield figure(f"{count} streams with their prompts", "tokens/s", whole[1:], target)


def first_token(suite: Suite) -> Iterator[Figure]:
    """Milliseconds to the first token of a prompt."""
    with suite.chain(1) as chain:
        for length in suite.options.prompts:
            rounds = [
                chain.answer(suite.prompts(1, length, seed)[0], 1).first_token_s * 1e3
                for seed in range(suite.options.rounds + 1)
            ]
            target = at_most(_FIRST_TOKEN_MS[length]) if length in _FIRST_TOKEN_MS else None
            yield figure(f"first token of {length}", "ms", rounds[1:], target)


def hops(suite: Suite) -> Iterator[Figure]:
    """Two servers on the device beside one, for one stream and for eight."""
    found: dict[tuple[int, int], list[float]] = {}
    for servers in (1, 2):
        with suite.chain(servers) as chain:
            for count in (1, 8):
                rounds = []
                for seed in range(suite.options.rounds + 1):
                    timings = chain.answers(suite.prompts(count, 128, seed), suite.options.tokens)
                    rounds.append(_token_s(timings))
                found[servers, count] = rounds[1:]
    for count, bound in ((1, 0.94), (8, 0.9)):
        yield ratio(f"two servers / one, {count} streams", found[1, count], found[2, count], at_least(bound))
    added = [(two - one) * 1e3 for one, two in zip(found[1, 1], found[2, 1], strict=True)]
    yield figure("one more hop adds to a token", "ms", added, at_most(0.5))


def sampled(suite: Suite) -> Iterator[Figure]:
    """Drawn tokens with penalties beside greedy ones."""
    count = max(suite.options.streams)
    with suite.chain(1) as chain:
        speeds: dict[str, list[float]] = {"greedy": [], "sampled": []}
        for seed in range(suite.options.rounds + 1):
            for name, options in (("greedy", {"temperature": 0}), ("sampled", _SAMPLED)):
                prompts = suite.prompts(count, 128, 2 * seed + (name == "sampled"))
                seconds = _seconds(chain, prompts, suite.options.tokens, options)
                speeds[name].append(count * suite.options.tokens / seconds)
    yield ratio(f"{count} streams sampled / greedy", speeds["sampled"][1:], speeds["greedy"][1:], at_least(0.95))


def company(suite: Suite) -> Iterator[Figure]:
    """How many of eight answers asked at once are what each is alone, in per cent."""
    with suite.chain(2) as chain:
        prompts = suite.prompts(8, 128, 0)
        alone = [_answers(chain, [prompt], suite.options.tokens)[0] for prompt in prompts]
        shares = []
        for _ in range(suite.options.rounds):
            found = _answers(chain, prompts, suite.options.tokens)
            shares.append(100 * sum(one == other for one, other in zip(found, alone, strict=True)) / len(prompts))
    yield figure("answers in company equal to those alone", "%", shares, at_least(100.0))


PARTS: Final[Mapping[str, Callable[[Suite], Iterator[Figure]]]] = {
    "streams": streams, "first_token": first_token, "hops": hops, "sampled": sampled, "company": company,
}  # fmt: skip
"""The parts of the suite, by the names that `--parts` takes."""


def _token_s(timings: Sequence[Timing]) -> float:
    """Seconds of a token in the later half of an answer, when all prompts are in: the median of the answers."""
    halves = [each.stamps_s[len(each.stamps_s) // 2 - 1 :] for each in timings]
    return statistics.median((half[-1] - half[0]) / (len(half) - 1) for half in halves)


def _answers(chain: Chain, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list[tuple[int, ...]]:
    async def ask() -> list[tuple[int, ...]]:
        given = {"temperature": 0, **options}
        calls = (chain.client.generate(list(each), max_tokens=num_tokens, ignore_eos=True, **given) for each in prompts)
        return [answer.token_ids for answer in await asyncio.gather(*calls)]

    found: list[tuple[int, ...]] = chain.run(ask())
    return found


def _seconds(chain: Chain, prompts: Sequence[Sequence[int]], num_tokens: int, options: Mapping[str, Any]) -> float:
    started_s = time.perf_counter()
    _answers(chain, prompts, num_tokens, **options)
    return time.perf_counter() - started_s
