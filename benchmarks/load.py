"""Open-loop load: requests that come when they come, whether or not the chain keeps up.

    python -m benchmarks.load --rates 0.5 0.8 3 --seconds 60

Arrivals are a Poisson process at a multiple of the measured capacity (8 streams in a closed loop). Times count from the
moment when a request was meant to be sent. Goodput is tokens of answers that kept the service level: first token in
time, and no stall. Refused requests are counted, and are none of the latencies.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.chain import Chain
from benchmarks.command import progress, random_ids, run
from benchmarks.figures import Figure, Target, at_most, figure, percentile
from benchmarks.streams import speed
from benchmarks.timing import Timing
from corolla.chassis.errors import CorollaError
from corolla.models.checkpoint import Checkpoint

_CLOSED_STREAMS = 8
# At three times capacity, streams that run keep their pace.
_OVERLOAD = 3.0
_MOST_OVERLOADED_STALL = 3.0


@dataclass
class Outcome:
    """Of one rate."""

    answers: list[Timing] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, GGUF file, hub id or demo")
    parser.add_argument("--servers", type=int, default=2, help="hops")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.8, 3.0], help="multiples of the capacity")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each rate")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of one answer")
    parser.add_argument("--running", type=int, default=16, help="requests that the client service runs at a time")
    parser.add_argument("--waiting", type=int, default=16, help="requests that wait at a time; more are refused")
    parser.add_argument("--first-token-s", type=float, default=2.0, help="service level: time to the first token")
    parser.add_argument("--stall-s", type=float, default=0.5, help="service level: longest time between tokens")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    checkpoint.fetch()
    environment = {
        "COROLLA_MAX_RUNNING_REQUESTS": str(options.running),
        "COROLLA_MAX_WAITING_REQUESTS": str(options.waiting),
    }
    prompts = [random_ids(options.prompt_tokens, checkpoint.vocab_size, seed) for seed in range(_CLOSED_STREAMS)]
    with Chain(options.model, options.servers, environment=environment) as chain:
        speed(chain, prompts, options.tokens)
        capacity = speed(chain, prompts, 2 * options.tokens)
        yield figure(f"capacity, {_CLOSED_STREAMS} streams in a closed loop", "tokens/s", [capacity])
        alone = [gap for _ in range(3) for gap in chain.answer(prompts[0], options.tokens).gaps_s]
        yield figure("between tokens, one stream alone, p99", "ms", [1000 * percentile(alone, 99)])
        unloaded_p99_s: float | None = None
        for rate in options.rates:
            arrivals_per_s = rate * capacity / options.tokens
            own_bytes = sum(chain.resident_bytes().values())
            progress(f"load {rate:g}: {arrivals_per_s:.2f} requests/s for {options.seconds:g} s")
            outcome: Outcome = chain.run(_offer(chain, checkpoint.vocab_size, arrivals_per_s, options))
            progress("")
            gaps_s = [gap for answer in outcome.answers for gap in answer.gaps_s]
            target = None
            if unloaded_p99_s is not None and rate >= _OVERLOAD:
                target = at_most(1000 * _MOST_OVERLOADED_STALL * unloaded_p99_s)
            if gaps_s:
                unloaded_p99_s = unloaded_p99_s or percentile(gaps_s, 99)
            yield from _figures(f"load {rate:g}", outcome, options, target)
            grown = sum(chain.resident_bytes().values()) - own_bytes
            yield figure(f"load {rate:g}, memory that all processes grew by", "MiB", [grown / (1 << 20)])


async def _offer(chain: Chain, vocab_size: int, arrivals_per_s: float, options: argparse.Namespace) -> Outcome:
    outcome, generator, tasks = Outcome(), random.Random(0), []
    began_s = time.perf_counter()
    intended_s = began_s
    while intended_s - began_s < options.seconds:
        await asyncio.sleep(max(0.0, intended_s - time.perf_counter()))
        prompt = random_ids(options.prompt_tokens, vocab_size, generator.getrandbits(30))
        tasks.append(asyncio.create_task(_ask(chain, prompt, options.tokens, intended_s, outcome)))
        intended_s += generator.expovariate(arrivals_per_s)
    await asyncio.gather(*tasks)
    outcome.elapsed_s = time.perf_counter() - began_s
    return outcome


async def _ask(chain: Chain, prompt: list[int], num_tokens: int, intended_s: float, outcome: Outcome) -> None:
    sent_s = time.perf_counter()
    try:
        outcome.answers.append(await chain.timed(prompt, num_tokens, started_s=intended_s))
    except CorollaError as refusal:
        if refusal.code.name != "RESOURCE_EXHAUSTED":
            raise
        outcome.refusals_s.append(time.perf_counter() - sent_s)


def _figures(load: str, outcome: Outcome, options: argparse.Namespace, most_stall: Target | None) -> Iterator[Figure]:
    answers = outcome.answers
    num_all = len(answers) + len(outcome.refusals_s)
    yield figure(f"{load}, requests", "", [num_all])
    yield figure(f"{load}, refused", "%", [100 * len(outcome.refusals_s) / max(1, num_all)])
    if outcome.refusals_s:
        yield figure(f"{load}, until refused, p99", "ms", [1000 * percentile(outcome.refusals_s, 99)], at_most(100))
    if not answers:
        return
    kept = [each for each in answers if each.first_token_s <= options.first_token_s
            and max(each.gaps_s) <= options.stall_s]  # fmt: skip
    yield figure(f"{load}, goodput", "tokens/s", [len(kept) * options.tokens / outcome.elapsed_s])
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    for what, times_s, target in (
        ("first token", [each.first_token_s for each in answers], None),
        ("between tokens", gaps_s, most_stall),
        ("whole answer", [each.total_s for each in answers], None),
    ):
        yield figure(f"{load}, {what}, p50", "ms", [1000 * percentile(times_s, 50)])
        yield figure(f"{load}, {what}, p99", "ms", [1000 * percentile(times_s, 99)], target)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
