"""Families as the cases of a test: some for each feature, one for each kind, all of them in the end."""

from collections.abc import Collection, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Final

from corolla.models.families import FAMILIES, Family
from tests.tiers import quick

# Names of modules and settings; whichever a family has, they are handled alike.
_PLACES: Final = frozenset({"model_type", "layers", "embedding", "norm", "required", "set_in_blocks", "stored_as"})

_WITHIN_BLOCKS: Final = frozenset({"fused", "has_rope_alpha", "packs_states", "picks_tokens", "read_weights"})
"""What decides only how a block computes: tests of spans compare these bit for bit."""

SHAPES: Final = ("llama", "gemma2", "bloom", "mixtral", "deepseek_v3", "lfm2", "qwen3_next")
"""Fused blocks, alternating windows and capped scores, rows that are computed one by one, experts, latents, and the two
kinds of recurrent states."""


def kind_of(family: Family, *, within_blocks: bool = True) -> tuple[tuple[bool, ...], ...]:
    """Which of the table's flags and special parts the family has; without those of blocks alone if so asked."""
    left_out = _PLACES if within_blocks else _PLACES | _WITHIN_BLOCKS
    return tuple(
        _flags(getattr(family, field.name), left_out) for field in fields(Family) if field.name not in left_out
    )


def _flags(value: Any, left_out: Collection[str]) -> tuple[bool, ...]:
    names = [field.name for field in fields(value) if field.name not in left_out] if is_dataclass(value) else []
    return (bool(value), *(bool(getattr(value, name)) for name in names))


def family_cases(
    families: Iterable[str] = FAMILIES,
    kept: Collection[str] = SHAPES,
    *,
    every: bool = True,
    within_blocks: bool = True,
) -> list[Any]:
    """Families as parameters: `make test` runs those in `kept`, the gate one of each other kind as well.

    Args:
        families: the model types.
        kept: those that `make test` runs.
        every: whether `make test-all` runs all others; where only the table's flags decide what runs, kinds suffice.
        within_blocks: see `kind_of`; False for tests of chains in processes, in which blocks are what they are alone.
    """
    names = sorted(families)
    own = [name for name in names if name in kept]
    covered = {kind_of(FAMILIES[name], within_blocks=within_blocks) for name in own}
    kinds = []
    for name in names:
        if (kind := kind_of(FAMILIES[name], within_blocks=within_blocks)) not in covered:
            covered.add(kind)
            kinds.append(name)
    return quick(names if every else [*own, *kinds], *own, kinds=kinds)
