"""Everything that was set out to be reached, with what was measured and whether it was enough.

    python -m benchmarks.targets                     # about 15 minutes; nothing else should run on the machine
    python -m benchmarks.targets --quick             # about 5 minutes; few rounds
    python -m benchmarks.targets --markdown          # as a table for benchmarks/README.md

Each line comes from one of the other benchmarks, whose own command says more.
"""

import argparse
from collections.abc import Iterator

from benchmarks import hops, microbatches, prefill, prefix, single_stream, streams
from benchmarks.command import AddOptions, Measure, run
from benchmarks.figures import Figure

_PARTS: tuple[tuple[AddOptions, Measure, str, str], ...] = (
    (single_stream.add_options, single_stream.measure, "--rounds 15", "--rounds 5"),
    (streams.add_options, streams.measure, "--streams 1 8 16", "--streams 1 8 16 --rounds 2"),
    (prefill.add_options, prefill.measure, "--hops 2 --lengths 512", "--hops 2 --lengths 512 --rounds 3"),
    (prefix.add_options, prefix.measure, "", "--rounds 3"),
    (hops.add_options, hops.measure, "", "--rounds 3"),
    (microbatches.add_options, microbatches.measure, "", "--rounds 2"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer rounds")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    for add_part_options, measure_part, usual, quick in _PARTS:
        parser = argparse.ArgumentParser()
        add_part_options(parser)
        given = parser.parse_args((quick if options.quick else usual).split())
        yield from (figure for figure in measure_part(given) if figure.target is not None)


if __name__ == "__main__":
    run(__doc__, add_options, measure)
