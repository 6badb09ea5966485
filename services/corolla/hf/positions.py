"""Says at which positions tokens stand, and refuses padding and positions that blocks would read in another way.

Blocks count the tokens of each row, padding left out. transformers counts columns where it is given no positions, and
some of its layers measure distances in columns. Where that makes a difference, a sentence says what to give instead.
"""

import copy
import functools
from typing import Final

import torch
from torch import Tensor
from transformers import AutoModel, PretrainedConfig

from corolla.models.checkpoint import context_length_of
from corolla.models.empty_model import cut_class, model_class_of, without_weights
from corolla.models.families import family_of, num_blocks, recurrent_layers
from corolla.models.span_model import cut_to_span
from corolla.models.visible_tokens import attention_windows
from corolla.wire.span import Span

# Families whose own `forward`, where it is given no positions, counts tokens; the others count columns.
_SKIPPING_PADDING: Final = frozenset({"bloom", "opt"})

# Families whose blocks compute something else when all positions are raised by the same number: they scale the numbers
# of a head after its rotation, or queries by their position.
_FEELING_OFFSETS: Final = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe", "ministral3", "mistral4"})

# Families without attention windows or recurrent states that nevertheless measure distances in columns.
_MEASURING_COLUMNS: Final = frozenset({"gpt_neo", "mpt"})


# Families that scale queries by their column, padding counted, and the setting with the first column that they scale.
_SCALING_COLUMNS: Final = {"llama4_text": "floor_scale"}


class PositionRules:
    """How a model counts positions.

    Args:
        config: the configuration of the whole model.

    Attributes:
        has_free_positions: whether only the embedding knows positions, so that any of them can be given.
        skips_padding: whether transformers counts tokens where it is given no positions, not columns.
        feels_offset: whether blocks compute something else when all positions are raised by the same number.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        family = family_of(config)
        self.has_free_positions = family.learned_positions is not None
        self.skips_padding = family.model_type in _SKIPPING_PADDING
        self.feels_offset = family.model_type in _FEELING_OFFSETS
        first_scaled = _SCALING_COLUMNS.get(family.model_type)
        self._most_padded = None if first_scaled is None else int(getattr(config, first_scaled)) - 1
        self._config = config
        self._num_positions = context_length_of(config)

    @functools.cached_property
    def measures_columns(self) -> bool:
        """Padding between two tokens makes them more distant."""
        family = family_of(self._config)
        if family.model_type in _MEASURING_COLUMNS or recurrent_layers(self._config):
            return True
        config = copy.deepcopy(self._config)
        config._attn_implementation = "eager"  # every family has this one
        cut_to = functools.partial(cut_to_span, family=family, span=Span(0, num_blocks(config)))
        base = without_weights(cut_class(model_class_of(AutoModel, config), cut_to), config)
        return any(window is not None for window in attention_windows(base, family))

    def refuse_holes(self, mask: Tensor) -> None:
        """Raises ValueError if padding between two tokens would change the result.

        Args:
            mask: bool `[B, T]`, on any device.
        """
        if has_holes(mask) and self.measures_columns:
            raise ValueError(
                "`attention_mask` has padding between tokens: this model's layers measure distances in columns, and "
                "block servers get no padding. Pad on the left only."
            )

    def positions(self, mask: Tensor, num_new: int, given: Tensor | None) -> Tensor:
        """The positions of the new columns, int64 `[B, num_new]` on the CPU; positions of padding mean nothing.

        Args:
            mask: bool `[B, T]` on the CPU: all columns, the cache's too.
            num_new: the number of new columns, which are the last ones.
            given: the caller's `position_ids`, `[B, num_new]` or `[1, num_new]`, on any device, if any.

        Raises:
            ValueError: blocks would count otherwise than transformers, or a position does not exist.
        """
        self.refuse_holes(mask)
        if self._most_padded is not None and mask.shape[1] > self._most_padded and not bool(mask.all()):
            raise ValueError(
                f"`attention_mask` has padding, which transformers counts in texts of this model beyond "
                f"{self._most_padded} columns, and remote blocks cannot; give texts of equal length."
            )
        new = slice(mask.shape[1] - num_new, None)
        counted = (mask.long().cumsum(dim=1) - 1)[:, new]
        if given is not None:
            return self._given(given, counted, mask[:, new])
        if bool(mask.all()) or self.skips_padding:
            return counted
        if self.has_free_positions:
            return torch.arange(mask.shape[1])[new].expand_as(counted)
        if self.feels_offset or has_holes(mask):
            raise ValueError(
                "`attention_mask` has padding, and without `position_ids` transformers counts it, which remote blocks "
                "cannot; give `position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)`, as `generate` does."
            )
        return counted

    def _given(self, given: Tensor, counted: Tensor, mask: Tensor) -> Tensor:
        shape = list(counted.shape)
        if given.dim() > 2 or given.shape[-1:] != counted.shape[-1:] or given.shape[:-1] not in ((), (1,), (shape[0],)):
            raise ValueError(f"`position_ids` must have the shape {shape} of the tokens, not {list(given.shape)}.")
        positions = given.cpu().expand_as(counted)
        if not self.has_free_positions:
            if not torch.equal(positions[mask].double(), counted[mask].double()):
                raise ValueError(
                    "`position_ids` must count each row's tokens, padding left out, on from those in the cache; remote "
                    "blocks know no others."
                )
            return counted
        outside = positions[mask & ((positions < 0) | (positions >= self._num_positions))]
        if outside.numel() or positions.is_floating_point():
            raise ValueError(
                f"`position_ids` must be whole numbers from 0 to {self._num_positions - 1}, the positions of the model."
            )
        return torch.where(mask, positions.long(), 0)


def has_holes(mask: Tensor) -> bool:
    """Some row of `mask`, bool `[B, T]` on any device, has padding between two tokens."""
    seen = mask.long().cumsum(dim=1)
    return bool((~mask & (seen > 0) & (seen < seen[:, -1:])).any())
