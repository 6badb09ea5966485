"""Time to plan a chain, beside a planner that lists every hop.

    python -m benchmarks.planner --servers 200 --blocks 120

Servers hold random spans in three zones, each with a speed and a queue of its own, so that no two are equal. Times are
processor time of one thread: a router plans on its event loop.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from benchmarks.command import interleaved, run
from benchmarks.figures import Figure, at_most, figure, ratio
from corolla.planning.planner import Candidate, LinkCosts, PlannedChain, plan
from corolla.wire.span import Span
from tests.unit.planning import listing_planner

_COSTS: Final = LinkCosts()
_MOST_MS: Final = 5.0
_NUM_TRIES: Final = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    source = random.Random(0)
    for most_blocks in (options.blocks // 8, options.blocks // 2, options.blocks):
        servers = _placement(source, options.servers, options.blocks, most_blocks)
        planned, listed = partial(plan, servers, options.blocks, _COSTS), partial(_listed, servers, options.blocks)
        assert planned() == listed()
        found = interleaved({"new": _timed(planned), "old": _timed(listed)}, options.rounds)
        label = f"{options.servers} servers with 1 to {most_blocks} of {options.blocks} blocks"
        yield figure(f"plan, {label}", "ms", found["new"], at_most(_MOST_MS))
        yield ratio(f"every hop listed / plan, {label}", found["old"], found["new"])


def _placement(source: random.Random, num_servers: int, num_blocks: int, most_blocks: int) -> list[Candidate]:
    """Servers of random spans; the first few cover all blocks, so that there is a chain."""
    spans = [Span(start, min(start + most_blocks, num_blocks)) for start in range(0, num_blocks, most_blocks)]
    while len(spans) < num_servers:
        start = source.randrange(num_blocks)
        spans.append(Span(start, min(num_blocks, start + source.randint(1, most_blocks))))
    return [
        Candidate(
            f"s{index}", f"s{index}:1", "f", span, source.uniform(0.001, 0.01),
            source.choice([0.0, source.uniform(0, 0.1)]), source.choice("abc"),
        )
        for index, span in enumerate(spans[:num_servers])
    ]  # fmt: skip


def _listed(servers: list[Candidate], num_blocks: int) -> PlannedChain | None:
    return listing_planner.cheapest(servers, Span(0, num_blocks), _COSTS)


def _timed(act: Callable[[], object]) -> Callable[[], float]:
    """Milliseconds of processor time, the median of a few tries."""

    def once() -> float:
        started = time.thread_time()
        act()
        return (time.thread_time() - started) * 1000

    return lambda: statistics.median(once() for _ in range(_NUM_TRIES))


if __name__ == "__main__":
    run(__doc__, add_options, measure)
