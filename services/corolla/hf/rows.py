"""What the rows of a session hold, in tokens: the book by which a cache is found again, cut and forked.

A row is one sequence. Positions count columns, the same for all rows; a column that is masked in a row (padding) was
never sent for it, so a hop's own count of the row's tokens is smaller by as many.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

UNKNOWN_TOKEN: Final = -1
"""Stands where a row was given embeddings, not a token."""


class HeldRows:
    """The columns that all rows have processed.

    Attributes:
        token_ids: int64 `[R, P]`.
        mask: bool `[R, P]`, false where nothing was sent.
        sources: for each row the place on the hops that has its tokens; its next step moves them to its own.
        num_prefix: leading columns that are no text, such as trained prompts.
        origins: for each row a number; only rows with the same one hold the same where their tokens are the same.
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
        """How many tokens the hops hold of each row, as far as it counts."""
        counts: list[int] = self.mask.sum(dim=1).tolist()
        return counts

    @property
    def is_settled(self) -> bool:
        """Whether every row's tokens lie in its own place."""
        return self.sources == list(range(self.num_rows))

    def extend(self, token_ids: Tensor, mask: Tensor) -> None:
        """Books a step: `[R, T]` new columns. All rows with new tokens have moved to their own places."""
        self.token_ids = torch.cat([self.token_ids, token_ids], dim=1)
        self.mask = torch.cat([self.mask, mask], dim=1)
        self.sources = list(range(self.num_rows))

    def truncate(self, position: int) -> None:
        """Forgets the columns from `position` on."""
        self.token_ids = self.token_ids[:, :position]
        self.mask = self.mask[:, :position]
        self.num_prefix = min(self.num_prefix, position)

    def select(self, rows: Sequence[int]) -> None:
        """Row `i` becomes what row `rows[i]` is; there may be more rows afterwards, or fewer."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        self.token_ids = self.token_ids[index]
        self.mask = self.mask[index]
        self.sources = [self.sources[row] for row in rows]
        self.origins = [self.origins[row] for row in rows]

    def count_prefix(self) -> None:
        """Counts the columns that began the rows as embeddings, and so can be no text, as their prefix.

        Raises:
            ValueError: embeddings were given behind text; then nobody knows what the text is.
        """
        is_unknown = (self.token_ids == UNKNOWN_TOKEN).any(dim=0).long()
        num_leading = int(is_unknown.cumprod(dim=0).sum())
        if is_unknown[num_leading:].any():
            raise ValueError("The session was stepped by hand behind its text; set its position back first.")
        self.num_prefix = num_leading

    def align(self, token_ids: Tensor, mask: Tensor) -> None:
        """Keeps what can serve a text, and forgets the rest.

        Each new row begins as the row that agrees with it longest. At least one column is left to process, because the
        output of the last one is wanted.

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
            # Prefixes cannot be compared; a row keeps that of the row from which it is repeated.
            lengths[torch.arange(self.num_rows)[None, :] != repeated[:, None]] = -1
        length = int(lengths.max(dim=1).values.min())
        best: list[int] = lengths.argmax(dim=1).tolist()
        rows = [
            row if row < self.num_rows and int(lengths[row, row]) >= length else best[row]
            for row in range(num_new_rows)
        ]
        self.truncate(self.num_prefix + length)
        self.select(rows)
