"""The three tiers of tests, and which part of the largest one a run of the gate takes.

| command | runs | mark |
| --- | --- | --- |
| `make test` | one test or more of every feature | none |
| `make test-gate` | these, every kind of a matrix, and a quarter of all that is left | `kind` |
| `make test-all` | everything | `full` |

The gate's quarter is chosen by the number of the commit, so four commits in a row run everything.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest

NUM_QUARTERS: Final = 4


def quick(values: Iterable[Any], *kept: Any, kinds: Collection[Any] = ()) -> list[Any]:
    """The values as parameters of a test.

    Args:
        values: all cases.
        kept: cases that `make test` runs.
        kinds: cases that stand for all that is of their kind: every run of the gate has them.

    Raises:
        ValueError: `kept` or `kinds` has what is not among the values, so that a renamed case does not leave silently.
    """
    cases = list(values)
    if unknown := [each for each in (*kept, *kinds) if each not in cases]:
        raise ValueError(f"no such cases: {unknown}")

    def parameter(case: Any) -> Any:
        if case in kept:
            return case
        return pytest.param(case, marks=pytest.mark.kind if case in kinds else pytest.mark.full)

    return [parameter(each) for each in cases]


def covering(*factors: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases in which each pair of values of two factors occurs: what finds the mistakes of a product in fewer cases.

    Args:
        factors: the values of each.
        strength: of how many factors each combination of values occurs.
    """

    def combinations(case: tuple[Any, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(case), strength))

    lists = [list(values) for values in factors]
    products = list(itertools.product(*(range(len(values)) for values in lists)))
    left = set[tuple[tuple[int, int], ...]]().union(*map(combinations, products))
    chosen = []
    while left:
        best = max(products, key=lambda case: len(combinations(case) & left))
        left -= combinations(best)
        chosen.append(tuple(values[index] for values, index in zip(lists, best, strict=True)))
    return chosen


def outside_of_quarter(node_ids: Iterable[str], quarter: int) -> set[str]:
    """The node ids that another quarter runs.

    Cases of one test go to the quarters in turn, so that each has its share of a test that takes long; where the first
    one goes depends on the test's name alone.
    """
    seen: Counter[str] = Counter()
    outside = set()
    for node_id in node_ids:
        test = node_id.partition("[")[0]
        if (zlib.crc32(test.encode()) + seen[test]) % NUM_QUARTERS != quarter % NUM_QUARTERS:
            outside.add(node_id)
        seen[test] += 1
    return outside
