"""What standbys cost while nothing fails, and the speed that is left while servers die.

    python -m benchmarks.standbys --rounds 5
    python -m benchmarks.standbys --rounds 0 --goodput-minutes 5

The model has two servers for each half. Answers with standbys and without take turns on the same servers; prompts are
new each time. Goodput is the tokens that callers get while a random server dies every ten seconds and starts again, of
those that they get while the same number of servers of another, idle chain do so on the same machine.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from benchmarks.chain import Chain
from benchmarks.command import interleaved, progress, random_ids, run
from benchmarks.figures import Figure, at_least, figure, ratio
from benchmarks.timing import Timing
from corolla.models.checkpoint import Checkpoint

_NUM_STREAMS: Final = (1, 8, 16)
_DECODED: Final = 128
_PROMPT_OF_DECODED: Final = 16
_ANSWER_OF_PROMPT: Final = 8
_MODES: Final = ("off", "all")
_GOODPUT_STREAMS: Final = 16
_KILL_INTERVAL_S: Final = 10.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id or demo")
    parser.add_argument("--rounds", type=int, default=5, help="of answers with standbys and without")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--certificates", action="store_true", help="encrypt all connections by mutual TLS")
    parser.add_argument("--goodput-minutes", type=float, default=0.0, help="of each of the two runs")
    parser.add_argument("--goodput-tokens", type=int, default=1000, help="of each answer")
    parser.add_argument("--seed", type=int, default=1)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    checkpoint = Checkpoint.from_pretrained(options.model)
    half, end = checkpoint.num_blocks // 2, checkpoint.num_blocks
    blocks = f"0:{half},{half}:{end},0:{half},{half}:{end}"
    environment = {"COROLLA_STANDBY": "all"}
    with Chain(
        options.model, 4, blocks=blocks, environment=environment, restarts=False, is_secure=options.certificates
    ) as chain:
        generator = random.Random(options.seed)
        vocab_size = checkpoint.vocab_size
        if options.rounds:
            yield from _costs(options, chain, vocab_size, generator)
        if options.goodput_minutes:
            yield from _goodput(options, chain, vocab_size, generator)


def _costs(options: argparse.Namespace, chain: Chain, vocab_size: int, generator: random.Random) -> Iterator[Figure]:
    """The speed of answers with standbys over that of answers without."""

    def timings(num_streams: int, prompt_tokens: int, num_tokens: int, mode: str) -> list[Timing]:
        prompts = [random_ids(prompt_tokens, vocab_size, generator.getrandbits(32)) for _ in range(num_streams)]
        return chain.answers(prompts, num_tokens, standby=mode)

    def decoding(num_streams: int, mode: str) -> float:
        heard = timings(num_streams, _PROMPT_OF_DECODED, _DECODED, mode)
        spent_s: float = max(each.stamps_s[-1] for each in heard) - min(each.stamps_s[0] for each in heard)
        return num_streams * (_DECODED - 1) / spent_s

    def prompts(num_streams: int, mode: str) -> float:
        heard = timings(num_streams, options.prompt_tokens, _ANSWER_OF_PROMPT, mode)
        spent_s: float = max(each.stamps_s[0] for each in heard) - min(each.started_s for each in heard)
        num_tokens: int = num_streams * options.prompt_tokens
        return num_tokens / spent_s

    ways = {"decoded tokens": (decoding, 0.97), "prompt tokens": (prompts, 0.90 if options.certificates else 0.93)}
    sides: dict[str, Callable[[], float]] = {
        f"{what}, {count}, {mode}": partial(way, count, mode)
        for what, (way, _) in ways.items()
        for count in _NUM_STREAMS
        for mode in _MODES
    }
    speeds = interleaved(sides, options.rounds)
    for what, (_, goal) in ways.items():
        for count in _NUM_STREAMS:
            off, on = (speeds[f"{what}, {count}, {mode}"] for mode in _MODES)
            yield figure(f"{count} streams, without standbys", f"{what}/s", off)
            yield ratio(f"{count} streams, {what}/s with standbys / without", on, off, at_least(goal))


def _goodput(options: argparse.Namespace, chain: Chain, vocab_size: int, generator: random.Random) -> Iterator[Figure]:
    """Tokens per second while servers die, of those while others die."""
    questions = [random_ids(_PROMPT_OF_DECODED, vocab_size, generator.getrandbits(32)) for _ in range(_GOODPUT_STREAMS)]
    with Chain(options.model, 2, restarts=False) as idle:
        runs = {
            name: _run(options, chain, questions, dying, random.Random(options.seed))
            for name, dying in (("undisturbed", idle), ("disturbed", chain))
        }
    truth = dict(runs["undisturbed"][1])
    disturbed = runs["disturbed"][1]
    speeds = {name: num_tokens / (60 * options.goodput_minutes) for name, (num_tokens, _) in runs.items()}
    yield figure(f"{_GOODPUT_STREAMS} streams, a server dies every 10 s", "tokens/s", [speeds["disturbed"]])
    goodput = speeds["disturbed"] / speeds["undisturbed"]
    yield figure("the same, of a run in which idle servers die", "x", [goodput], at_least(0.95))
    share = sum(token_ids == truth.get(number) for number, token_ids in disturbed) / max(1, len(disturbed))
    yield figure(f"{len(disturbed)} whole answers that equal undisturbed ones", "share", [share], at_least(1.0))


def _run(
    options: argparse.Namespace, chain: Chain, questions: list[list[int]], dying: Chain, generator: random.Random
) -> tuple[int, list[tuple[int, tuple[int, ...]]]]:
    """The tokens that came within the time, and each whole answer with the number of its question."""
    until_s = time.perf_counter() + 60 * options.goodput_minutes
    num_tokens = 0
    answers: list[tuple[int, tuple[int, ...]]] = []

    async def ask_on(number: int) -> None:
        nonlocal num_tokens
        while time.perf_counter() < until_s:
            stamps: list[float] = []
            try:
                async with asyncio.timeout(until_s - time.perf_counter()):
                    timing = await chain.timed(questions[number], options.goodput_tokens, stamps)
                answers.append((number, timing.token_ids))
            except TimeoutError:
                pass
            num_tokens += len(stamps)

    async def ask() -> None:
        await asyncio.gather(*map(ask_on, range(len(questions))), asyncio.to_thread(kill_on))

    def kill_on() -> None:
        while (rest_s := until_s - time.perf_counter()) > 0:
            progress(f"{rest_s:.0f} s are left")
            began_s = time.perf_counter()
            victim = generator.choice(dying.servers)
            dying.kill(victim)
            dying.until(lambda: not dying.is_alive(victim), f"the end of {victim.name}")  # noqa: B023
            dying.launch(victim)
            dying.until_ready(victim)
            time.sleep(max(0.0, _KILL_INTERVAL_S - (time.perf_counter() - began_s)))

    chain.run(ask())
    return num_tokens, answers


if __name__ == "__main__":
    run(__doc__, add_options, measure)
