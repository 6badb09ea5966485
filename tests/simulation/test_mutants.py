"""Each mistake is found, within few seeds, which hold without it (`test_seeds`)."""

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.run import run

MOST_SEEDS = 240


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.full
@pytest.mark.timeout(900)  # of the last seeds, on a machine that has other things to do
def test_a_mistake_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert any(run(seed).broken for seed in range(MOST_SEEDS)), f"nobody noticed: {name}"
