"""Texts on pages, whose attention the kernels compute in any cut."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corolla.cache.codecs import KVCodec
from corolla.kernels.page_tables import PageTables
from corolla.kernels.triton.launches import attend
from tests.triton_kernels import DEVICE


class PagedTexts:
    """Random queries, keys and values of several texts; keys and values lie on pages in a drawn order.

    Slots that hold no token are NaN, and so are keys that a text has not reached yet.

    Args:
        lengths: the tokens of each text.
        page_tokens: tokens of a page.
        heads: the numbers of query heads and key heads.
        head: the size of a head.
        dtype: the dtype of all numbers.
        codec: stores keys and values on the pages; the texts have the numbers that it gives back. None: there is none.
        rotated: how many numbers of a key lie in the place of its value, as in multi-latent attention; 0: a value does.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        page_tokens: int,
        heads: tuple[int, int],
        head: int,
        dtype: torch.dtype,
        codec: KVCodec | None = None,
        rotated: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        num_heads, self.num_key_heads = heads

        def draw(length: int, count: int, size: int) -> Tensor:
            return torch.randn(length, count, size, generator=generator, device="cpu").to(DEVICE, dtype)

        def drawn(length: int, size: int) -> Tensor:
            numbers = draw(length, heads[1], size)
            return numbers if codec is None else codec.decode(codec.encode(numbers))

        self.page_tokens, self.head, self._codec, self._rotated = page_tokens, head, codec, rotated
        self.texts = [(draw(n, num_heads, head + rotated), drawn(n, head), drawn(n, rotated or head)) for n in lengths]
        counts = [-(-n // page_tokens) for n in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator, device="cpu")[1:].tolist()
        self._pages: list[list[int]] = [[order.pop() for _ in range(count)] for count in counts]
        num_slots = (sum(counts) + 1) * page_tokens
        self.keys, self.values = (
            self._stored(torch.full((num_slots, heads[1], size), torch.nan, dtype=dtype)).clone()
            for size in (head, rotated or head)
        )

    def step(
        self,
        rows: Sequence[tuple[int, int, int]],
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> list[Tensor]:
        """Stores the tokens `[start, end)` of texts, given as (text, start, end), and attends for all in one call."""
        for text, start, end in rows:
            slots = [self._slot(text, position) for position in range(start, end)]
            _, keys, values = self.texts[text]
            self.keys[slots], self.values[slots] = self._stored(keys[start:end]), self._stored(values[start:end])
        ends = torch.tensor([end - start for _, start, end in rows]).cumsum(0).tolist()
        width = max(map(len, self._pages))
        counts = [-(-end // self.page_tokens) for _, _, end in rows]

        def integers(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32)

        tables = PageTables(
            pages=integers([[*self._pages[text], *[0] * (width - len(self._pages[text]))] for text, _, _ in rows]),
            first_queries=integers([0, *ends]),
            num_keys=integers([end for _, _, end in rows]),
            first_pages=integers([sum(counts[:row]) for row in range(len(rows))]),
            max_queries=max(end - start for _, start, end in rows),
            num_pages=sum(counts),
            page_tokens=self.page_tokens,
        )
        query = torch.cat([self.texts[text][0][start:end] for text, start, end in rows])
        output = attend(
            query, self.keys, self.values, tables, scaling=self.head**-0.5, window=window, softcap=softcap, sinks=sinks,
            codec=None if self._codec is None else self._codec.name,
        )  # fmt: skip
        return list(torch.split(output, [end - start for _, start, end in rows]))

    def definition(self, text: int, window: int | None, softcap: float | None, sinks: Tensor | None = None) -> Tensor:
        """A text's attention by its definition, float64 `[T, heads, head_dim]`."""
        query, keys, values = (part.double() for part in self.texts[text])
        if self._rotated:
            keys, values = torch.cat((keys, values), dim=-1), keys
        groups = query.shape[1] // self.num_key_heads
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * self.head**-0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        positions = torch.arange(len(keys))
        distance = positions[:, None] - positions[None, :]
        unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=-1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(keys)], values)

    def spoil(self, text: int, num_tokens: int) -> None:
        """Puts NaN in the place of the keys and values of a text's first pages, those with so many tokens or fewer."""
        for position in range(num_tokens // self.page_tokens * self.page_tokens):
            slot = self._slot(text, position)
            self.keys[slot] = self.values[slot] = torch.nan

    def _stored(self, numbers: Tensor) -> Tensor:
        return numbers if self._codec is None else self._codec.encode(numbers)

    def _slot(self, text: int, position: int) -> int:
        page = self._pages[text][position // self.page_tokens]
        return page * self.page_tokens + position % self.page_tokens
