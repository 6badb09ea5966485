"""Families as the cases of a test: some for each feature, one for each kind, all of them in the end."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, Final

from corolla.models.families import FAMILIES, Family
from tests.tiers import quick

# Names of modules; whichever a family has, they are handled alike.
_PLACES: Final = frozenset({"model_type", "layers", "embedding", "norm"})

SHAPES: Final = ("llama", "gemma2", "bloom", "mixtral", "deepseek_v3", "lfm2", "qwen3_next")
"""Fused blocks, alternating windows and capped scores, rows that are computed one by one, experts, latents, and the two
kinds of recurrent states."""


def kind_of(family: Family) -> tuple[bool, ...]:
    """Which of the table's flags and special parts the family has."""
    return tuple(bool(getattr(family, field.name)) for field in fields(Family) if field.name not in _PLACES)


def family_cases(
    families: Iterable[str] = FAMILIES, kept: Collection[str] = SHAPES, *, every: bool = True
) -> list[Any]:
    """Families as parameters: `make test` runs those in `kept`, the gate one of each other kind as well.

    Args:
        families: the model types.
        kept: those that `make test` runs.
        every: whether `make test-all` runs all others; where only the table's flags decide what runs, kinds suffice.
    """
    names = sorted(families)
    own = [name for name in names if name in kept]
    covered = {kind_of(FAMILIES[name]) for name in own}
    kinds = []
    for name in names:
        if (kind := kind_of(FAMILIES[name])) not in covered:
            covered.add(kind)
            kinds.append(name)
    return quick(names if every else [*own, *kinds], *own, kinds=kinds)
