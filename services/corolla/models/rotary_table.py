"""The cosines and sines of rotary embeddings (RoPE, Su et al. 2021), in a table for all positions.

LongRoPE (Ding et al. 2024, the type `longrope`) has other factors for long texts.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

MIN_POSITIONS: Final = 1024
"""The least number of positions in a table; most texts are shorter."""

_BY_POSITION_ALONE: Final = ("default", "linear", "llama3", "yarn")
"""The types of rotary embeddings in which a position's numbers do not depend on the length of the text.

A fixed `alpha` makes `dynamic` one of them.
"""


class Turn(NamedTuple):
    """How the queries and keys of a call's tokens are turned. All tensors are on the device of hidden states.

    Attributes:
        cos: `[N, 1, rotary size]` in the dtype of hidden states, or float32: the cosines of each token's position.
        sin: `[N, 1, rotary size]` in the same dtype: its signed sines.
        query_factors: `[N, 1, 1]` in the dtype of hidden states, the factors of turned queries; None: there are none.
    """

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None = None


class RotaryTable:
    """A table of cosines and signed sines, with the numbers of the family's own module. It grows with the positions.

    Rotating a head's halves (`rotate_half`) is a roll and a change of sign; the sines in the table include the sign. A
    rotary size below the head size means that the other numbers of a head stay as they are.

    Args:
        in_pairs: whether a number is rotated with its neighbour, not with the one half the rotary size away.
        has_paired_angles: see `FusedBlocks.has_paired_angles`.
        scales_queries: see `FusedBlocks.scales_queries`.
        kind: the kind of layers whose numbers these are, where the configuration has some for each kind; else None.

    Attributes:
        size: the rotary size: how many numbers of a head are rotated.
        scales_queries: whether queries get factors.
    """

    def __init__(
        self,
        rotary: nn.Module,
        config: Any,
        *,
        in_pairs: bool = False,
        has_paired_angles: bool = False,
        scales_queries: bool = False,
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
        self.scales_queries = scales_queries
        self._parameters = parameters
        self._is_lasting = parameters.get("rope_type", "default") in _BY_POSITION_ALONE or "alpha" in parameters
        self._table = torch.empty(0)

    @property
    def table(self) -> Tensor:
        """The current table `[positions, 2, rotary size]`, on the device of hidden states.

        Its dtype is that of the family's module: that of hidden states, or float32. It is empty before the first call,
        and always if each call computes its own rows.
        """
        return self._table

    def turn(self, position_ids: Tensor, end: int, like: Tensor) -> Turn:
        """How queries and keys at positions are turned.

        Args:
            position_ids: int64 `[N]`, all below `end`.
            like: a tensor of any shape with the device and dtype of hidden states, the same ones in all calls.
        """
        table, numbers = self.numbered(position_ids, end, like)
        if numbers is not None:
            table = table.index_select(0, numbers)
        return Turn(table[:, 0:1], table[:, 1:2], self.query_factors(position_ids, like))

    def query_factors(self, position_ids: Tensor, like: Tensor) -> Tensor | None:
        """The factors of queries, which grow with the logarithm of the position, as in Llama 4 and Ministral 3.

        Args:
            position_ids: int64 `[N]`, on the device of hidden states.
            like: a tensor of any shape with the device and dtype of hidden states.

        Returns:
            `[N, 1, 1]` in the dtype of `like`, on its device; None: there are none.
        """
        if not self.scales_queries:
            return None
        beta, length = self._parameters["llama_4_scaling_beta"], self._parameters["original_max_position_embeddings"]
        factors: Tensor = 1 + beta * torch.log(1 + torch.floor(position_ids / length))
        return factors.to(like.dtype)[:, None, None]

    def numbered(self, position_ids: Tensor, end: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A table of cosines and signed sines, `[rows, 2, rotary size]`, and the row of each position.

        Takes the arguments of `turn`; see `RotaryTable.turn`.

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
