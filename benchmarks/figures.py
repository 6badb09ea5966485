"""What benchmarks find: figures with their spread over the rounds, and what they were to reach."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

_MAX_ERROR_LENGTH: Final = 600


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of several rounds."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:8.2f}  ({self.smallest:.2f} to {self.largest:.2f})"


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure's median is to reach."""

    bound: float
    is_most: bool = False

    def is_reached(self, value: float) -> bool:
        return value <= self.bound if self.is_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'at most' if self.is_most else 'at least'} {self.bound:.4g}"


def at_least(bound: float) -> Target:
    return Target(bound)


def at_most(bound: float) -> Target:
    return Target(bound, is_most=True)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table.

    Attributes:
        name: what was measured, with everything that it depends on.
        unit: of the spread; "x" is a ratio formed within each round.
        target: what the median is to reach, where something was set out.
        error: why nothing was measured; then the spread has no numbers.
    """

    name: str
    unit: str
    spread: Spread
    target: Target | None = None
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.error:
            return "FAILED"
        if self.target is None:
            return ""
        return "reached" if self.target.is_reached(self.spread.median) else "NOT REACHED"


def figure(name: str, unit: str, values: Iterable[float], target: Target | None = None) -> Figure:
    return Figure(name, unit, Spread.of(list(values)), target)


def failure(name: str, error: BaseException) -> Figure:
    """The row of a measurement that failed."""
    words = " ".join(str(error).split())[:_MAX_ERROR_LENGTH]
    return Figure(name, "", Spread(math.nan, math.nan, math.nan), error=f"{type(error).__name__}: {words}")


def ratio(name: str, above: Sequence[float], below: Sequence[float], target: Target | None = None) -> Figure:
    """The ratio of two rows of rounds, formed within each round."""
    return figure(name, "x", [one / other for one, other in zip(above, below, strict=True)], target)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least this many percent of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def as_json(figures: Sequence[Figure]) -> str:
    """A failed measurement has no spread in it, since JSON has no number for one."""
    return json.dumps(
        [{**asdict(each), **({"spread": None} if each.error else {}), "verdict": each.verdict} for each in figures],
        indent=2,
    )


def as_line(figure: Figure) -> str:
    """One figure as soon as it is measured."""
    if figure.error:
        return f"{figure.name}: {figure.verdict}, {figure.error}"
    return f"{figure.name}: {figure.spread} {figure.unit} {figure.target or ''} {figure.verdict}".rstrip()


def as_table(figures: Sequence[Figure], *, markdown: bool = False) -> str:
    """Aligned text, or Markdown for a README."""
    head = ("figure", "unit", "median", "smallest to largest", "to reach", "verdict")
    rows = [
        (each.name, "", "", each.error, "", each.verdict)
        if each.error
        else (each.name, each.unit, _short(each.spread.median),
              f"{_short(each.spread.smallest)} to {_short(each.spread.largest)}",
              str(each.target or ""), each.verdict)
        for each in figures
    ]  # fmt: skip
    if markdown:
        lines = [head, tuple("---" for _ in head), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *rows)
    )


def _short(value: Any) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
