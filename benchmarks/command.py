"""The command line that all benchmarks share."""

import argparse
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

import torch

from benchmarks.figures import Figure, as_json, as_line, as_table

Measure = Callable[[argparse.Namespace], Iterable[Figure]]
AddOptions = Callable[[argparse.ArgumentParser], None]


def run(description: str | None, add_options: AddOptions, measure: Measure, arguments: list[str] | None = None) -> None:
    """Parses the options, measures, and prints the table.

    Each figure also goes to standard error as soon as it is measured. The exit status is 1 if a measurement failed.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table, dated, with the machine")
    options = parser.parse_args(arguments)
    figures = []
    for each in measure(options):
        print(as_line(each), file=sys.stderr, flush=True)
        figures.append(each)
    show(figures, as_json_text=options.json, markdown=options.markdown)
    if any(each.error for each in figures):
        sys.exit(1)


def show(figures: list[Figure], *, as_json_text: bool, markdown: bool) -> None:
    if as_json_text:
        print(as_json(figures))
        return
    if markdown:
        print(f"{date.today()}, {machine()}:\n")
    print(as_table(figures, markdown=markdown))


def machine() -> str:
    """Cores, processor and torch, in words."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores, {model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def progress(what: str) -> None:
    """Says on standard error what is under way, where somebody is looking."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def random_ids(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids that no earlier prompt began with, so that nothing of them is cached anywhere."""
    generator = random.Random(seed)
    return [generator.randrange(min(256, vocab_size // 2), vocab_size) for _ in range(num_tokens)]


def interleaved(sides: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Runs all sides in each round, in an order that changes, after one round to warm up.

    Returns:
        What each side gave, round by round.
    """
    generator = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(num_rounds + 1):
        for name in generator.sample(list(sides), len(sides)):
            progress(f"round {number} of {num_rounds}: {name}")
            value = sides[name]()
            if number:
                found[name].append(value)
    progress("")
    return found
