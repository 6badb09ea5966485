"""One class for each row of the table of families, by the family's own name."""

import pytest
import transformers

import corolla.hf
from corolla.hf.families import CLASSES_BY_NAME, MODEL_CLASSES
from corolla.models.families import FAMILIES


def test_every_family_has_a_class() -> None:
    assert set(MODEL_CLASSES) == set(FAMILIES)
    assert len(CLASSES_BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize("name", sorted(CLASSES_BY_NAME))
def test_a_class_is_named_after_that_of_transformers(name: str) -> None:
    assert hasattr(transformers, name.removeprefix("Distributed"))
    assert getattr(corolla.hf, name) is CLASSES_BY_NAME[name]
    assert name in corolla.hf.__all__
    assert CLASSES_BY_NAME[name].can_generate()
