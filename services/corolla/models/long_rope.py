"""Rotary embeddings of the type `longrope` (LongRoPE, Ding et al. 2024), with other factors for long texts."""

from typing import Any

import torch
from torch import Tensor, nn


class LongRope(nn.Module):
    """Wraps a family's own rotary embedding, so that each row's factors depend only on that row's text.

    The family's code chooses the factors by the longest position of a call. So a long text would change the factors of
    short texts in the same call, and the first chunk of a long prompt would get the factors of short texts.

    Args:
        rotary: the family's module; it returns cosines and sines `[1, N, size]`, which depend only on positions.
        short_length: the length, in tokens, of the longest text with the factors for short texts.

    Attributes:
        is_long: whether the tokens of the next call belong to long texts; a bool `[N]` on their device, if some do.
            That all or none do is known on the host, so that no call waits for the device.
    """

    def __init__(self, rotary: nn.Module, short_length: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.short_length = short_length
        self.is_long: Tensor | bool = False

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines `[1, N, size]` of `position_ids`, int64 `[1, N]`.

        They have the dtype and device of `x`, which has any shape.
        """
        if isinstance(self.is_long, bool):
            return self._long(x, position_ids) if self.is_long else self._short(x, position_ids)
        is_long = self.is_long[None, :, None]
        cos, sin = self._short(x, position_ids)
        long_cos, long_sin = self._long(x, position_ids)
        return torch.where(is_long, long_cos, cos), torch.where(is_long, long_sin, sin)

    def _short(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._own(x, position_ids.clamp(max=self.short_length - 1))

    def _long(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # An additional position that only a long text can have makes the module choose the long factors.
        beyond = torch.full_like(position_ids[:, :1], self.short_length)
        cos, sin = self._own(x, torch.cat((position_ids, beyond), dim=1))
        return cos[:, :-1], sin[:, :-1]

    def _own(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        tables: Any = self.rotary(x, position_ids=position_ids)
        cos, sin = tables
        return cos, sin
