"""One class for each row of the table of families, by the family's own name."""

import pytest
import transformers

import corolla
import corolla.hf
from corolla.hf.families import CLASSES_BY_NAME, MODEL_CLASSES
from corolla.hf.speculative import SPECULATIVE_CLASSES_BY_NAME
from corolla.models.families import FAMILIES


@pytest.mark.parametrize("name", [name for name in corolla.__all__ if name in corolla.hf.__all__])
def test_the_top_of_the_package_has_the_names_of_the_library(name: str) -> None:
    assert getattr(corolla, name) is getattr(corolla.hf, name)


def test_the_top_of_the_package_has_every_name_but_those_of_families() -> None:
    assert set(corolla.hf.__all__) - set(corolla.__all__) == {*CLASSES_BY_NAME, *SPECULATIVE_CLASSES_BY_NAME}
    with pytest.raises(AttributeError, match="DistributedAbacus"):
        corolla.DistributedAbacus  # noqa: B018 - reading the name is the test


def test_every_family_has_a_class() -> None:
    assert set(MODEL_CLASSES) == set(FAMILIES)
    assert len(CLASSES_BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize("name", sorted(CLASSES_BY_NAME))
def test_a_class_is_named_after_that_of_transformers(name: str) -> None:
    assert hasattr(transformers, name.removeprefix("Distributed"))
    assert getattr(corolla.hf, name) is getattr(corolla, name) is CLASSES_BY_NAME[name]
    assert name in corolla.hf.__all__
    assert CLASSES_BY_NAME[name].can_generate()
