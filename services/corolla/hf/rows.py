"""Records the tokens that the rows of a session hold, so that a cache can be matched with a text, cut and forked.

A row is one sequence. Positions count columns, the same for all rows. A column that is masked in a row (padding) was
never sent for it, so a hop counts fewer tokens in that row. All tensors are on the CPU.
"""

import copy
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

UNKNOWN_TOKEN: Final = -1
"""Marks a position at which a row was given embeddings, not a token."""


class HeldRows:
    """The columns that all rows have processed.

    Attributes:
        token_ids: int64 `[R, P]`.
        mask: bool `[R, P]`, False where nothing was sent.
        sources: for each row, the row whose session on the hops holds its tokens; the next step moves them to its own.
        num_prefix: the number of leading columns that are not text, such as trained prompts.
        origins: a number for each row; equal tokens have equal keys and values only in rows with the same number.
    """

    def __init__(self, num_rows: int, origins: Sequence[int] | None = None) -> None:
        self.origins = [0] * num_rows if origins is None else list(origins)
        self.token_ids = torch.empty(num_rows, 0, dtype=torch.int64)
        self.mask = torch.empty(num_rows, 0, dtype=torch.bool)
        self.sources = list(range(num_rows))
        self.num_prefix = 0

    @property
    def num_rows(self) -> int:
        return len(self.sources)

    @property
    def position(self) -> int:
        return self.token_ids.shape[1]

    @property
    def row_positions(self) -> list[int]:
        """The number of each row's tokens that the hops hold and that were not forgotten."""
        counts: list[int] = self.mask.sum(dim=1).tolist()
        return counts

    @property
    def is_settled(self) -> bool:
        """Every row's tokens are in its own session."""
        return self.sources == list(range(self.num_rows))

    def settled(self) -> "HeldRows":
        """A copy in which every row's tokens are in its own session."""
        twin = copy.copy(self)
        twin.sources, twin.origins = list(range(self.num_rows)), list(self.origins)
        return twin

    def extend(self, token_ids: Tensor, mask: Tensor) -> None:
        """Records a step of new columns: `token_ids`, int64 `[R, T]`, and `mask`, bool `[R, T]`.

        After the step, each row's tokens are in its own session.
        """
        self.token_ids = torch.cat([self.token_ids, token_ids], dim=1)
        self.mask = torch.cat([self.mask, mask], dim=1)
        self.sources = list(range(self.num_rows))

    def truncate(self, position: int) -> None:
        """Forgets the columns from `position` on."""
        self.token_ids = self.token_ids[:, :position]
        self.mask = self.mask[:, :position]
        self.num_prefix = min(self.num_prefix, position)

    def select(self, rows: Sequence[int]) -> None:
        """Replaces row `i` by what row `rows[i]` is. The number of rows may change."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        self.token_ids = self.token_ids[index]
        self.mask = self.mask[index]
        self.sources = [self.sources[row] for row in rows]
        self.origins = [self.origins[row] for row in rows]

    def count_prefix(self) -> None:
        """Sets the prefix to the leading columns that were given as embeddings, which cannot be text.

        Raises:
            ValueError: embeddings were given after text, so the text is not known.
        """
        is_unknown = (self.token_ids == UNKNOWN_TOKEN).any(dim=0).long()
        num_leading = int(is_unknown.cumprod(dim=0).sum())
        if is_unknown[num_leading:].any():
            raise ValueError("The session was stepped by hand behind its text; set its position back first.")
        self.num_prefix = num_leading

    def align(self, token_ids: Tensor, mask: Tensor) -> None:
        """Keeps the columns that are part of a text, and forgets the rest.

        Each row of the text continues the held row with the longest equal beginning. At least the text's last column is
        left to process, because its output is wanted.

        Args:
            token_ids: int64 `[R, T]`, the whole text after the prefix.
            mask: bool `[R, T]`.
        """
        num_columns = min(token_ids.shape[1] - 1, self.position - self.num_prefix)
        wanted = slice(0, num_columns)
        held = slice(self.num_prefix, self.num_prefix + num_columns)
        given, given_mask = token_ids[:, None, wanted], mask[:, None, wanted]
        kept, kept_mask = self.token_ids[None, :, held], self.mask[None, :, held]
        is_same = (given_mask == kept_mask) & ((given == kept) | ~given_mask)
        lengths = is_same.long().cumprod(dim=2).sum(dim=2)
        num_new_rows = token_ids.shape[0]
        repeated = torch.arange(num_new_rows) * self.num_rows // num_new_rows
        origins = torch.tensor(self.origins)
        lengths[origins[None, :] != origins[repeated][:, None]] = -1
        if self.num_prefix:
            # Prefixes cannot be compared, so a row keeps the prefix of the row that it repeats.
            lengths[torch.arange(self.num_rows)[None, :] != repeated[:, None]] = -1
        length = int(lengths.max(dim=1).values.min())
        best: list[int] = lengths.argmax(dim=1).tolist()
        rows = [
            row if row < self.num_rows and int(lengths[row, row]) >= length else best[row]
            for row in range(num_new_rows)
        ]
        self.truncate(self.num_prefix + length)
        self.select(rows)
