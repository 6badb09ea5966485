"""Page tables: the pages of a session in one group of layers, and the pages that a sliding window frees. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from corolla.cache.pages import PagePool

Extent = tuple[int, int]
"""A run of slots: the first slot and how many. Slot `s` is token `s % page_tokens` of page `s // page_tokens`."""

Copies = list[tuple[int, int]]
"""Pairs of pages to copy: source and target."""


_versions: Final = itertools.count(1)


@dataclass(frozen=True, slots=True)
class GroupRule:
    """The rule for how long a group of layers needs its tokens.

    Attributes:
        window: how many tokens a token sees, itself included; None for all.
        max_step_tokens: the most new tokens of one step. So many can be taken back although the window has moved on.
    """

    window: int | None = None
    max_step_tokens: int = 512

    @property
    def num_kept_tokens(self) -> int | None:
        """How many of the newest tokens always keep their pages; None for all."""
        return None if self.window is None else self.window - 1 + self.max_step_tokens

    def worst_case(self, pool: PagePool, max_tokens: int) -> int:
        """The most pages that a session of `max_tokens` tokens may hold at once."""
        num_pages = pool.pages_for(max_tokens)
        if self.num_kept_tokens is None:
            return num_pages
        # The oldest and the newest page may be held for one token each.
        return min(num_pages, pool.pages_for(self.num_kept_tokens + self.max_step_tokens) + 1)


class PageTable:
    """The pages of one session in one group of layers, in order, for the tokens from `first_token` on.

    The first `num_common` pages are held in common with other sessions: this one does not write to them. A group with a
    window holds none in common, since pages that it gives back have to be replaced by others.

    Invariant: from the first step of the session on, the table holds at most the pages that it was promised, apart from
    those held in common.

    Attributes:
        account: the account that is charged for the pages held in common; None: no account is.
        version: another number after each change of the pages; no two tables ever have the same one.
    """

    def __init__(self, pool: PagePool, rule: GroupRule) -> None:
        self._pool = pool
        self._rule = rule
        self._first = 0
        self._num_forgotten = 0
        self._pages: list[int] = []
        self._runs: list[tuple[int, int, int]] | None = None
        self.version = next(_versions)
        self.num_promised = 0
        self.num_common = 0
        self.account: str | None = None
        self._num_wanted = 0

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> Sequence[int]:
        """The ids of the pages that the table holds, in the order of their tokens."""
        return self._pages

    @property
    def first_index(self) -> int:
        """The index of the first page that is held, among the session's pages."""
        return self._first

    @property
    def end_index(self) -> int:
        """The index after that of the last page that is held."""
        return self._first + len(self._pages)

    @property
    def has_window(self) -> bool:
        """A sliding window frees the pages of old tokens."""
        return self._rule.num_kept_tokens is not None

    @property
    def first_token(self) -> int:
        """The position of the first token of the first page that is held."""
        return self._first * self._pool.page_tokens

    @property
    def first_held_token(self) -> int:
        """The position of the first token that is held. Its page may begin with tokens that were never held here."""
        return max(self.first_token, self._num_forgotten)

    @property
    def min_position(self) -> int:
        """The lowest position after 0 from which this group lets the session continue."""
        if not self.first_held_token or self._rule.window is None:
            return 0
        return self.first_held_token + self._rule.window - 1

    def num_written_pages(self, num_tokens: int) -> int:
        """The number of held pages among the pages of the first `num_tokens` tokens."""
        return max(0, self._pool.pages_for(num_tokens) - self._first)

    def whole_page(self, index: int) -> int | None:
        """Like `page`, but None also for a page that lacks its first tokens."""
        return self.page(index) if index * self._pool.page_tokens >= self._num_forgotten else None

    def page(self, index: int) -> int | None:
        """The id of the session's page `index`; None if it was given back or not taken yet."""
        at = index - self._first
        return self._pages[at] if 0 <= at < len(self._pages) else None

    def worst_case(self, max_tokens: int) -> int:
        return self._rule.worst_case(self._pool, max_tokens)

    def resize(self, max_tokens: int) -> None:
        """Changes the table to hold pages for `max_tokens` tokens, within the promise."""
        self._num_wanted = self._pool.pages_for(max_tokens)
        self._cut(min(self._num_wanted, self._first + self.num_common + self.num_promised))
        self._fill()

    def make_writable(self, position: int, num_tokens: int) -> Copies:
        """Makes sure that the pages of new tokens exist and belong to this table alone.

        Returns:
            The copies of shared pages to make before the new tokens are written.

        Raises:
            OutOfPages: pages held in common would be written to, and the pool has too few for copies. After `own_from`
                this does not happen.
        """
        if position == 0 and self.first_held_token:
            self.clear()
        page_tokens = self._pool.page_tokens
        start, end = position // page_tokens, self._pool.pages_for(position + num_tokens)
        self.own_from(start)
        if end > (held_end := self.end_index):
            self._num_wanted = max(self._num_wanted, end)
            self._fill()
            if end > self.end_index:
                raise ValueError(f"a step of {num_tokens} tokens is longer than this cache was made for")
        held = range(start, min(end, held_end))
        shared = [index for index in held if not self._pool.may_write(self._pages[index - self._first])]
        if not shared:
            return []
        old = [self._pages[index - self._first] for index in shared]
        before = self.page(shared[0] - 1)
        new = self._pool.allocate(len(shared), before, grows=False)
        for index, page in zip(shared, new, strict=True):
            self._pages[index - self._first] = page
        self._pool.release(old)
        self._note_change()
        # Only the first of these pages can have tokens before the new ones.
        return [(old[0], new[0])] if shared[0] * page_tokens < position else []

    def own_from(self, index: int) -> None:
        """Gets a promise for the pages held in common from page `index` on, so that their tokens may be written.

        Raises:
            OutOfPages: the pool has too few pages for copies; nothing has changed.
        """
        num_owned = self.num_common - index
        if num_owned > 0:
            self._pool.stop_reading(self._pages[index : self.num_common], self.account, num_promised=num_owned)
            self.num_common, self.num_promised = index, self.num_promised + num_owned

    def hold_in_common(self, num_pages: int) -> None:
        """Holds the first `num_pages` pages in common, and gives the promise for them back."""
        num_more = min(num_pages, len(self._pages), self.num_common + self.num_promised) - self.num_common
        if num_more > 0 and not self.has_window:
            self._pool.promise(-num_more)
            self._pool.read(self._pages[self.num_common : self.num_common + num_more], self.account)
            self.num_common, self.num_promised = self.num_common + num_more, self.num_promised - num_more

    def charge_to(self, account: str | None) -> None:
        """Charges another account for the pages held in common."""
        if account != self.account:
            pages = self._pages[: self.num_common]
            self._pool.charge(pages, self.account, -1)
            self._pool.charge(pages, account)
            self.account = account

    def slide(self, num_tokens: int) -> None:
        """Gives back the pages that no token after the first `num_tokens` can see."""
        kept = self._rule.num_kept_tokens
        if kept is not None:
            self.release_before(max(0, num_tokens - kept))

    def release_before(self, token: int) -> None:
        """Gives back the whole pages before a token, as if the window had moved past them."""
        num_gone = min(token // self._pool.page_tokens - self._first, len(self._pages))
        if num_gone > 0:
            self._pool.release(self._pages[:num_gone])
            del self._pages[:num_gone]
            self._first += num_gone
            self._note_change()

    def forget_before(self, token: int) -> None:
        """Notes that the tokens before this one are not held, and gives back the whole pages before it."""
        self._num_forgotten = max(self._num_forgotten, token)
        self.release_before(token)

    def clear(self) -> None:
        """Gives all pages back; the promise remains."""
        self.stop_reading(0)
        self._pool.release(self._pages)
        self.drop()

    def stop_reading(self, index: int) -> None:
        """Holds no page in common from page `index` on. The caller gives these pages back."""
        if index < self.num_common:
            self._pool.stop_reading(self._pages[index : self.num_common], self.account)
            self.num_common = index

    def drop(self) -> None:
        """Forgets all pages, which the caller has given back."""
        self._set(0, [])

    def share(self, num_tokens: int) -> "PageTable":
        """Returns a table with the same pages for the first `num_tokens` tokens, and without a promise."""
        twin = PageTable(self._pool, self._rule)
        held = self._pages[: max(0, self._pool.pages_for(num_tokens) - self._first)]
        twin._set(self._first, held, self._num_forgotten)
        self._pool.share(twin._pages)
        twin.num_common = min(self.num_common, len(held))
        self._pool.read(held[: twin.num_common])  # this table reads them, so they count already
        return twin

    def adopt(self, twin: "PageTable", num_tokens: int, num_common: int) -> None:
        """Takes the pages of the first `num_tokens` tokens from `twin`, and keeps its own pages after them.

        `twin` is a table that `share` returned; it is empty afterwards. At most the first `num_common` pages are held
        in common from now on; this table may not hold more before.
        """
        twin._cut(self._pool.pages_for(num_tokens))
        end = twin.end_index
        twin.stop_reading(num_common)
        num_less = twin.num_common - self.num_common
        self._pool.stop_reading(self._pages[: self.num_common], self.account, num_promised=-num_less)
        self._pool.charge(twin._pages[: twin.num_common], self.account)
        self.num_promised -= num_less
        self.num_common, twin.num_common = twin.num_common, 0
        room = max(0, self.num_promised + self.num_common - len(twin._pages))
        start = end - self._first
        kept = self._pages[start : start + room] if start >= 0 else []
        self._pool.release(self._pages[:start] + self._pages[start + len(kept) :] if kept else self._pages)
        self._set(twin._first, twin._pages + kept, twin._num_forgotten)
        twin._set(0, [])

    def num_same_tokens(self, other: "PageTable") -> int:
        """How many of the first tokens lie on the same pages in both tables."""
        if self._first != other._first:
            return 0
        pairs = zip(self._pages, other._pages, strict=False)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return (self._first + num_same) * self._pool.page_tokens

    def hold_cached(self, first: int, pages: Sequence[int], num_common: int) -> None:
        """Takes pages of the prefix cache, which the caller has shared; the first becomes the session's page `first`.

        The table is empty before. The first `num_common` pages are held in common.

        Raises:
            OutOfPages: the pool has too few pages for those held in common.
        """
        self._set(first, list(pages))
        num_common = 0 if self.has_window else min(num_common, len(pages))
        self._pool.read(pages[:num_common], self.account)
        self.num_common = num_common

    def num_needed_pages(self) -> int | None:
        """How many pages directly before a page the first token of that page sees; None for all."""
        return None if self._rule.window is None else self._pool.pages_for(self._rule.window - 1)

    def num_passed_pages(self, num_pages: int) -> int:
        """How many of the first `num_pages` pages no token after them sees."""
        needed = self.num_needed_pages()
        return 0 if needed is None else max(0, num_pages - needed)

    def extents(self, start: int, end: int) -> tuple[Extent, ...]:
        """Returns the slots of positions `[start, end)`, merged into runs.

        Raises:
            ValueError: the table does not hold all of them.
        """
        page_tokens = self._pool.page_tokens
        if start < self.first_token or end > self.end_index * page_tokens:
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
        """Returns the slot of one position. Raises ValueError if the table does not hold it."""
        return self.newest(position)[0]

    def newest(self, position: int) -> tuple[int, int]:
        """Returns the slot of a position, and how many slots the table holds up to there, this one included.

        Raises:
            ValueError: the table does not hold the position.
        """
        page_tokens, first = self._pool.page_tokens, self._first
        index, within = divmod(position, page_tokens)
        if not first <= index < first + len(self._pages):
            raise ValueError(f"position {position} is not held")
        return self._pages[index - first] * page_tokens + within, position + 1 - first * page_tokens

    def _merged(self) -> list[tuple[int, int, int]]:
        """The runs of pages with consecutive ids: index and id of the first page, and the number of pages."""
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
        num_missing = min(self.num_common + self.num_promised, self._num_wanted - self._first) - len(self._pages)
        if num_missing > 0:
            self._pages += self._pool.allocate(num_missing, self._pages[-1] if self._pages else None)
            self._note_change()

    def _cut(self, num_pages: int) -> None:
        num_held = max(0, num_pages - self._first)
        if num_held < len(self._pages):
            self.stop_reading(num_held)
            self._pool.release(self._pages[num_held:])
            del self._pages[num_held:]
            self._note_change()

    def _set(self, first: int, pages: list[int], num_forgotten: int = 0) -> None:
        self._first, self._pages, self._num_forgotten = first, pages, num_forgotten
        self._note_change()

    def _note_change(self) -> None:
        self._runs, self.version = None, next(_versions)
