"""What documents say of families is what the table of families says."""

from corolla.models.families import FAMILIES
from tests.checkpoints import RECURRENT_FAMILIES


def test_families_with_recurrent_states_are_marked() -> None:
    assert {name for name, family in FAMILIES.items() if family.past.keeps_states} == set(RECURRENT_FAMILIES)
