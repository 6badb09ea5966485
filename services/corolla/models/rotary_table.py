"""A table of the cosines and sines of rotary embeddings (RoPE, Su et al. 2021), computed once for all positions."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from corolla.models.long_rope import LongRope

MIN_POSITIONS: Final = 1024
"""The least number of positions in a table; most texts are shorter."""

_BY_POSITION_ALONE: Final = ("default", "linear", "llama3", "yarn")
"""The types of rotary embeddings in which a position's numbers do not depend on the length of the text."""


class RotaryTable:
    """A table of cosines and signed sines, with the numbers of the family's own module. It grows with the positions.

    Rotating a head's halves (`rotate_half`) is a roll and a change of sign; the sines in the table include the sign. A
    rotary size below the head size means that the other numbers of a head stay as they are.

    Args:
        in_pairs: whether a number is rotated with its neighbour, not with the one half the rotary size away.
        has_paired_angles: see `FusedBlocks.has_paired_angles`.
        kind: the kind of layers whose numbers these are, where the configuration has some for each kind; else None.

    Attributes:
        size: the rotary size: how many numbers of a head are rotated.
    """

    def __init__(
        self,
        rotary: nn.Module,
        config: Any,
        *,
        in_pairs: bool = False,
        has_paired_angles: bool = False,
        kind: str | None = None,
    ) -> None:
        self._rotary = rotary
        self.in_pairs = in_pairs
        self._has_paired_angles = has_paired_angles
        own: Any = rotary.rotary if isinstance(rotary, LongRope) else rotary
        self.size = 2 * len(own.inv_freq if kind is None else getattr(own, f"{kind}_inv_freq"))
        self._kinds = () if kind is None else (kind,)
        parameters = getattr(config, "rope_parameters", None) or {}
        if kind is not None:
            parameters = parameters[kind]
        self._is_lasting = parameters.get("rope_type", "default") in _BY_POSITION_ALONE
        self._table = torch.empty(0)

    @property
    def table(self) -> Tensor:
        """The current table `[positions, 2, rotary size]`, on the device of hidden states.

        Its dtype is that of the family's module: that of hidden states, or float32. It is empty before the first call,
        and always if each call computes its own rows.
        """
        return self._table

    def rows(self, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and signed sines of positions, each `[N, 1, rotary size]`.

        Args:
            position_ids: int64 `[N]`, all below `end`.
            like: a tensor of any shape with the device and dtype of hidden states, the same ones in all calls.
        """
        table, numbers = self.numbered(position_ids, end, like)
        if numbers is not None:
            table = table.index_select(0, numbers)
        return table[:, 0:1], table[:, 1:2]

    def numbered(self, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A table of cosines and signed sines, `[rows, 2, rotary size]`, and the row of each position.

        Takes the arguments of `rows`; see `RotaryTable.rows`.

        Returns:
            The table and int64 `[N]`; None instead of the latter where row `i` belongs to position `i` of the call.
        """
        if not self._is_lasting:
            return self._compute(position_ids, like), None
        if end > len(self._table):
            num_positions = max(MIN_POSITIONS, 1 << (end - 1).bit_length())
            self._table = self._compute(torch.arange(num_positions, device=like.device), like)
        return self._table, position_ids

    def _compute(self, position_ids: Tensor, like: Tensor) -> Tensor:
        """Computes the rows of positions, `[N, 2, rotary size]`."""
        if like.is_meta and not self._is_lasting:  # the family's module could not compare the longest position
            return like.new_empty(len(position_ids), 2, self.size)
        cos, sin = self._rotary(like, position_ids.unsqueeze(0), *self._kinds)
        if cos.shape[-1] < self.size:  # each angle is given once, for both halves
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        half = sin.shape[-1] // 2
        if self.in_pairs:
            cos, sin = (each[..., ::2] if self._has_paired_angles else each[..., :half] for each in (cos, sin))
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
            return torch.stack((cos[0], sin[0]), dim=1)
        return torch.stack((cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)), dim=1)
