"""Page tables: which pages a session has in one group of layers, and what a sliding window lets go. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from corolla.cache.pages import PagePool

Extent = tuple[int, int]
"""A run of slots: the first one, and how many. Slot `s` is token `s % page_tokens` of page `s // page_tokens`."""

Copies = list[tuple[int, int]]
"""Pages to copy, from and to."""


@dataclass(frozen=True, slots=True)
class GroupRule:
    """How long a group of layers needs its tokens.

    Attributes:
        window: tokens that a token sees, itself included; None for all.
        max_step_tokens: new tokens of one step; as many can be taken back although the window has moved on.
    """

    window: int | None = None
    max_step_tokens: int = 512

    @property
    def num_kept_tokens(self) -> int | None:
        """Tokens before the next one that are never given back; None for all."""
        return None if self.window is None else self.window - 1 + self.max_step_tokens

    def worst_case(self, pool: PagePool, max_tokens: int) -> int:
        """Pages that a session of `max_tokens` tokens may hold at once."""
        num_pages = pool.pages_for(max_tokens)
        if self.num_kept_tokens is None:
            return num_pages
        # The oldest and the newest page may be held for one token each.
        return min(num_pages, pool.pages_for(self.num_kept_tokens + self.max_step_tokens) + 1)


class PageTable:
    """The pages of one session in one group of layers: those of the tokens from `first_token` on, in order.

    Invariant: it holds no more pages than it was promised, from the first step of its session on.
    """

    def __init__(self, pool: PagePool, rule: GroupRule) -> None:
        self._pool = pool
        self._rule = rule
        self._first = 0
        self._pages: list[int] = []
        self._runs: list[tuple[int, int, int]] | None = None
        self.num_promised = 0
        self._num_wanted = 0

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> Sequence[int]:
        """Ids of the pages that it holds, in the order of their tokens."""
        return self._pages

    @property
    def has_window(self) -> bool:
        """Whether tokens fall out of sight."""
        return self._rule.num_kept_tokens is not None

    @property
    def first_token(self) -> int:
        """Position of the first token that is held."""
        return self._first * self._pool.page_tokens

    @property
    def min_position(self) -> int:
        """The lowest position after 0 from which this group lets the session continue."""
        if not self._first or self._rule.window is None:
            return 0
        return self.first_token + self._rule.window - 1

    def num_written_pages(self, num_tokens: int) -> int:
        """Pages that hold the first `num_tokens` tokens, as far as they are still there."""
        return max(0, self._pool.pages_for(num_tokens) - self._first)

    def page(self, index: int) -> int | None:
        """Id of the session's page `index`; None for one that was given back, or not taken yet."""
        at = index - self._first
        return self._pages[at] if 0 <= at < len(self._pages) else None

    def worst_case(self, max_tokens: int) -> int:
        return self._rule.worst_case(self._pool, max_tokens)

    def resize(self, max_tokens: int) -> None:
        """Holds pages for so many tokens from now on, within what was promised for them."""
        self._num_wanted = self._pool.pages_for(max_tokens)
        self._cut(min(self._num_wanted, self._first + self.num_promised))
        self._fill()

    def make_writable(self, position: int, num_tokens: int) -> Copies:
        """Makes the pages of new tokens present and its own.

        Returns:
            Copies to make before anything is written: of pages that others hold, too.
        """
        if position == 0 and self._first:
            self.clear()
        page_tokens = self._pool.page_tokens
        start, end = position // page_tokens, self._pool.pages_for(position + num_tokens)
        held_end = self._first + len(self._pages)
        if end > held_end:
            self._num_wanted = max(self._num_wanted, end)
            self._fill()
            if end > self._first + len(self._pages):
                raise ValueError(f"a step of {num_tokens} tokens is longer than this cache was made for")
        held = range(start, min(end, held_end))
        shared = [index for index in held if not self._pool.may_write(self._pages[index - self._first])]
        if not shared:
            return []
        old = [self._pages[index - self._first] for index in shared]
        before = self.page(shared[0] - 1)
        new = self._pool.allocate(len(shared), before)
        for index, page in zip(shared, new, strict=True):
            self._pages[index - self._first] = page
        self._pool.release(old)
        self._runs = None
        # Only the first page can have tokens before the new ones.
        return [(old[0], new[0])] if shared[0] * page_tokens < position else []

    def slide(self, num_tokens: int) -> None:
        """Gives back the pages that no token after the first `num_tokens` can see."""
        kept = self._rule.num_kept_tokens
        if kept is not None:
            self.release_before(max(0, num_tokens - kept))

    def release_before(self, token: int) -> None:
        """Gives back the whole pages before a token, as if the window had moved on."""
        num_gone = min(token // self._pool.page_tokens - self._first, len(self._pages))
        if num_gone > 0:
            self._pool.release(self._pages[:num_gone])
            del self._pages[:num_gone]
            self._first += num_gone
            self._runs = None

    def clear(self) -> None:
        """Gives all pages back; the promise stands."""
        self._pool.release(self._pages)
        self._set(0, [])

    def share(self, num_tokens: int) -> "PageTable":
        """A table with the same pages for the first tokens, and no promise."""
        twin = PageTable(self._pool, self._rule)
        twin._set(self._first, self._pages[: max(0, self._pool.pages_for(num_tokens) - self._first)])
        self._pool.share(twin._pages)
        return twin

    def adopt(self, twin: "PageTable", num_tokens: int) -> None:
        """Takes another table's pages of the first tokens over, and keeps its own behind them."""
        twin._cut(self._pool.pages_for(num_tokens))
        end = twin._first + len(twin._pages)
        room = max(0, self.num_promised - len(twin._pages))
        start = end - self._first
        kept = self._pages[start : start + room] if start >= 0 else []
        self._pool.release(self._pages[:start] + self._pages[start + len(kept) :] if kept else self._pages)
        self._set(twin._first, twin._pages + kept)
        twin._set(0, [])

    def hold_cached(self, first: int, pages: list[int]) -> None:
        """Holds pages of the prefix cache instead of what it held; the first of them is the session's page `first`."""
        self._pool.share(pages)
        self._pool.release(self._pages)
        self._set(first, pages)

    def num_needed_pages(self) -> int | None:
        """Pages right before a page's first token that the token sees; None for all."""
        return None if self._rule.window is None else self._pool.pages_for(self._rule.window - 1)

    def extents(self, start: int, end: int) -> tuple[Extent, ...]:
        """The slots of positions `[start, end)`, merged into runs.

        Raises:
            ValueError: not all of them are held.
        """
        page_tokens = self._pool.page_tokens
        if start < self.first_token or end > (self._first + len(self._pages)) * page_tokens:
            raise ValueError(f"positions [{start}, {end}) are not all held")
        runs = self._merged()
        if len(runs) == 1 and start < end:
            index, page, _ = runs[0]
            return (((page - index) * page_tokens + start, end - start),)
        extents = []
        for index, page, count in runs:
            first = max(start, index * page_tokens)
            last = min(end, (index + count) * page_tokens)
            if first < last:
                extents.append((page * page_tokens + first - index * page_tokens, last - first))
        return tuple(extents)

    def slot(self, position: int) -> int:
        """The slot of one position. Raises ValueError where it is not held."""
        index, within = divmod(position, self._pool.page_tokens)
        page = self.page(index)
        if page is None:
            raise ValueError(f"position {position} is not held")
        return page * self._pool.page_tokens + within

    def _merged(self) -> list[tuple[int, int, int]]:
        """Runs of pages: index of the first one, its id, and how many."""
        if self._runs is None:
            runs: list[tuple[int, int, int]] = []
            for index, page in enumerate(self._pages, self._first):
                if runs and page == runs[-1][1] + runs[-1][2]:
                    runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
                else:
                    runs.append((index, page, 1))
            self._runs = runs
        return self._runs

    def _fill(self) -> None:
        num_missing = min(self.num_promised, self._num_wanted - self._first) - len(self._pages)
        if num_missing > 0:
            self._pages += self._pool.allocate(num_missing, self._pages[-1] if self._pages else None)
            self._runs = None

    def _cut(self, num_pages: int) -> None:
        num_held = max(0, num_pages - self._first)
        if num_held < len(self._pages):
            self._pool.release(self._pages[num_held:])
            del self._pages[num_held:]
            self._runs = None

    def _set(self, first: int, pages: list[int]) -> None:
        self._first, self._pages, self._runs = first, pages, None
