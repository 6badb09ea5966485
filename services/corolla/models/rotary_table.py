"""What rotary embeddings say of each position, computed once."""

from typing import Any, Final

import torch
from torch import Tensor, nn

MIN_POSITIONS: Final = 1024
"""For which a table is computed at once; most texts are shorter."""

_BY_POSITION_ALONE: Final = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings that say the same of a position however long the text is."""


class RotaryTable:
    """Rows of cosines and sines; the table grows with the positions that are asked for.

    Turning by half a head is a roll and a sign; the sign goes with the sines. The numbers are the ones that the
    family's own module gives.

    Args:
        rotary: the family's rotary embedding.
        config: the family's configuration.
    """

    def __init__(self, rotary: nn.Module, config: Any) -> None:
        self._rotary = rotary
        parameters = getattr(config, "rope_parameters", None) or {}
        self._is_lasting = parameters.get("rope_type", "default") in _BY_POSITION_ALONE
        self._table = torch.empty(0)

    @property
    def table(self) -> Tensor:
        """`[positions, 2, head_dim]`, which `rows` reads until it grows; empty where rows are computed each time."""
        return self._table

    def rows(self, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each `[N, 1, head_dim]`.

        Args:
            position_ids: int64 `[N]`, all before `end`.
            end: see there.
            like: in the device and dtype that the rows shall have; always the same ones.
        """
        table, numbers = self.numbered(position_ids, end, like)
        if numbers is not None:
            table = table.index_select(0, numbers)
        return table[:, 0:1], table[:, 1:2]

    def numbered(self, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A table of cosines and signed sines, `[rows, 2, head_dim]`, and the row of each position.

        Args: see `rows`.

        Returns:
            For the rows None where they are those of the positions, one by one.
        """
        if not self._is_lasting:
            return self._compute(position_ids, like), None
        if end > len(self._table):
            num_positions = max(MIN_POSITIONS, 1 << (end - 1).bit_length())
            self._table = self._compute(torch.arange(num_positions, device=like.device), like)
        return self._table, position_ids

    def _compute(self, position_ids: Tensor, like: Tensor) -> Tensor:
        """`[N, 2, head_dim]`."""
        cos, sin = self._rotary(like, position_ids.unsqueeze(0))
        half = sin.shape[-1] // 2
        return torch.stack((cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)), dim=1)
