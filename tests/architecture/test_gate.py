"""What the gate leaves out today it runs on one of the next three commits, and its stages keep to their budgets."""

import itertools
import json
from pathlib import Path

import pytest

from tests import durations
from tests.families import family_cases, kind_of
from tests.tiers import NUM_QUARTERS, covering, outside_of_quarter, quick


def test_each_case_belongs_to_one_quarter_and_each_quarter_has_its_share_of_a_test() -> None:
    cases = [f"tests/a.py::test_{name}[{number}]" for name in "xyz" for number in range(10)]
    quarters = [set(cases) - outside_of_quarter(cases, number) for number in range(NUM_QUARTERS)]
    assert sorted(case for quarter in quarters for case in quarter) == sorted(cases)
    for name in "xyz":
        assert {sum(f"test_{name}[" in case for case in quarter) for quarter in quarters} <= {2, 3}
    assert outside_of_quarter(cases, 7) == outside_of_quarter(cases, 3)


def test_cases_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no such cases"):
        quick(["a", "b"], "a", kinds=["c"])


def test_covering_cases_have_each_pair_of_values_and_are_few() -> None:
    factors = ([1, 2, 3], "abcd", [True, False], [None, 0])
    cases = covering(*factors)
    assert cases == covering(*factors)
    for one, other in itertools.combinations(range(len(factors)), 2):
        pairs = set(itertools.product(factors[one], factors[other]))
        assert {(case[one], case[other]) for case in cases} == pairs
    assert 12 <= len(cases) <= 14
    assert sorted(covering([1, 2], "ab")) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert len(covering([1, 2], "ab", [3, 4], strength=3)) == 8


def test_each_kind_of_family_has_one_that_the_gate_always_runs() -> None:
    from corolla.models.families import FAMILIES

    parameters = {each if isinstance(each, str) else each.values[0]: each for each in family_cases()}
    assert parameters.keys() == FAMILIES.keys()
    always = [name for name, each in parameters.items() if isinstance(each, str) or each.marks[0].name == "kind"]
    assert {kind_of(FAMILIES[name]) for name in always} == {kind_of(family) for family in FAMILIES.values()}
    kinds = [each if isinstance(each, str) else each.values[0] for each in family_cases(every=False)]
    assert sorted(kinds) == sorted(always)


def test_a_stage_that_takes_too_long_and_a_file_that_nobody_measured_are_found() -> None:
    most = durations.NUM_WORKERS * durations.BUDGETS_S["make test"]
    seconds = {"tests/unit/a.py": {"quick": most - 1.0}, "tests/unit/b.py": {"full": 1.0}}
    assert durations.faults_of(seconds, seconds) == []
    assert durations.faults_of(seconds, [*seconds, "tests/unit/c.py"]) == [
        "tests/unit/c.py was never measured: make durations ARGS=tests/unit/c.py"
    ]
    seconds["tests/unit/a.py"]["quick"] = most + 30.0
    (fault,) = durations.faults_of(seconds, seconds)
    assert fault.startswith(f"make test takes {durations.BUDGETS_S['make test'] + 10} s")


def test_what_is_measured_anew_replaces_what_was_and_files_that_are_gone_leave(tmp_path: Path) -> None:
    path, here = tmp_path / "durations.json", "tests/architecture/test_gate.py"
    path.write_text(json.dumps({here: {"quick": 3.0, "full": 4.0}, "tests/gone.py": {"quick": 1.0}}))
    durations.record(path, {here: {"quick": 2.04}})
    assert json.loads(path.read_text()) == {here: {"quick": 2.0}}
