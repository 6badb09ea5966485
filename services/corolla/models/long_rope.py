"""Rotary embeddings of the type `longrope`, which have other factors for long texts than for short ones."""

from typing import Any

import torch
from torch import Tensor, nn


class LongRope(nn.Module):
    """A family's own rotary embedding, which chooses the factors of each row by that row's text.

    The family's code looks at the longest position of the whole call: a long text would change the factors of the short
    ones in it, and the first chunk of a long prompt would get those of a short text.

    Args:
        rotary: the family's module; it gives two tensors `[1, N, size]`, of which only positions matter.
        short_length: tokens of the longest text with short factors.

    Attributes:
        is_long: bool `[N]`, of the next call: which tokens belong to long texts; None: no token does.
    """

    def __init__(self, rotary: nn.Module, short_length: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.short_length = short_length
        self.is_long: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """As the family's module, of positions int64 `[1, N]`."""
        if self.is_long is None or not self.is_long.any():
            return self._short(x, position_ids)
        if self.is_long.all():
            return self._long(x, position_ids)
        is_long = self.is_long[None, :, None]
        cos, sin = self._short(x, position_ids)
        long_cos, long_sin = self._long(x, position_ids)
        return torch.where(is_long, long_cos, cos), torch.where(is_long, long_sin, sin)

    def _short(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._own(x, position_ids.clamp(max=self.short_length - 1))

    def _long(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # One position more, which only a long text has, decides for all.
        beyond = torch.full_like(position_ids[:, :1], self.short_length)
        cos, sin = self._own(x, torch.cat((position_ids, beyond), dim=1))
        return cos[:, :-1], sin[:, :-1]

    def _own(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        tables: Any = self.rotary(x, position_ids=position_ids)
        cos, sin = tables
        return cos, sin
