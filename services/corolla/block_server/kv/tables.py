"""Which pages one session has: page tables, forks that share, and what sliding windows let go. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from corolla.block_server.kv.pages import PagePool
from corolla.block_server.kv.prefixes import ExpectedText, PrefixKey, longest_match
from corolla.chassis.errors import OutOfPages

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
    def first_token(self) -> int:
        """Position of the first token that is held."""
        return self._first * self._pool.page_tokens

    @property
    def min_position(self) -> int:
        """The lowest position after 0 from which the session can go on, as far as this group is concerned."""
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
        new = self._pool.take(len(shared), before)
        for index, page in zip(shared, new, strict=True):
            self._pages[index - self._first] = page
        self._pool.drop(old)
        self._runs = None
        # Only the first page can have tokens before the new ones.
        return [(old[0], new[0])] if shared[0] * page_tokens < position else []

    def slide(self, num_tokens: int) -> None:
        """Gives back the pages that no token after the first `num_tokens` can see."""
        kept = self._rule.num_kept_tokens
        if kept is None:
            return
        num_gone = max(0, num_tokens - kept) // self._pool.page_tokens - self._first
        if num_gone > 0:
            self._pool.drop(self._pages[:num_gone])
            del self._pages[:num_gone]
            self._first += num_gone
            self._runs = None

    def clear(self) -> None:
        """Gives all pages back; the promise stands."""
        self._pool.drop(self._pages)
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
        self._pool.drop([page for page in self._pages if page not in kept] if kept else self._pages)
        self._set(twin._first, twin._pages + kept)
        twin._set(0, [])

    def match(self, first: int, pages: list[int]) -> None:
        """Holds pages of the prefix cache instead of what it held; the first of them is the session's page `first`."""
        self._pool.share(pages)
        self._pool.drop(self._pages)
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
        extents = []
        for index, page, count in self._merged():
            first = max(start, index * page_tokens)
            last = min(end, (index + count) * page_tokens)
            if first < last:
                extents.append((page * page_tokens + first - index * page_tokens, last - first))
        return tuple(extents)

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
            self._pages += self._pool.take(num_missing, self._pages[-1] if self._pages else None)
            self._runs = None

    def _cut(self, num_pages: int) -> None:
        num_held = max(0, num_pages - self._first)
        if num_held < len(self._pages):
            self._pool.drop(self._pages[num_held:])
            del self._pages[num_held:]
            self._runs = None

    def _set(self, first: int, pages: list[int]) -> None:
        self._first, self._pages, self._runs = first, pages, None


class SessionPages:
    """What one session holds: how many tokens, and for each group of layers a page table.

    Args:
        pool: of the server.
        rules: of the groups.
    """

    def __init__(self, pool: PagePool, rules: Sequence[GroupRule]) -> None:
        self.pool = pool
        self._rules = tuple(rules)
        self.tables = tuple(PageTable(pool, rule) for rule in rules)
        self.num_tokens = 0
        self.num_reserved_tokens = 0
        self._text: ExpectedText | None = None
        self._num_remembered = 0
        self._has_stepped = False

    @property
    def num_pages(self) -> int:
        """Pages that were promised to it."""
        return sum(table.num_promised for table in self.tables)

    @property
    def min_position(self) -> int:
        """From here to `num_tokens`, and from 0, the session can go on."""
        return max(table.min_position for table in self.tables)

    def can_continue_from(self, position: int) -> bool:
        return position == 0 or self.min_position <= position <= self.num_tokens

    def nearest_position(self, position: int) -> int:
        """The highest position, up to this one, from which the session can go on."""
        position = min(position, self.num_tokens)
        return position if self.can_continue_from(position) else 0

    def worst_case(self, max_tokens: int) -> int:
        """Pages that a session of `max_tokens` tokens may hold at once."""
        return sum(table.worst_case(max_tokens) for table in self.tables)

    def reserve(self, max_tokens: int) -> None:
        """Room for just so many tokens from now on.

        Raises:
            OutOfPages: nothing changed.
            ValueError: it holds more tokens.
        """
        if max_tokens < self.num_tokens:
            raise ValueError(f"{self.num_tokens} tokens do not fit where {max_tokens} are reserved")
        wanted = [max(table.worst_case(max_tokens), table.num_written_pages(self.num_tokens)) for table in self.tables]
        num_more = sum(wanted) - self.num_pages
        if num_more > 0:
            self.pool.promise(num_more)
        for table, num_pages in zip(self.tables, wanted, strict=True):
            table.num_promised = num_pages
            table.resize(max_tokens)
        if num_more < 0:
            self.pool.promise(num_more)
        self.num_reserved_tokens = max_tokens

    def open(self, max_tokens: int, text: ExpectedText | None = None) -> None:
        """Room for just so many tokens; an empty session begins with what the prefix cache has of its text.

        Raises:
            OutOfPages: nothing changed.
        """
        was_empty = not self.num_tokens
        if was_empty and text is not None:
            self._begin_with_cached(text, max_tokens)
        try:
            self.reserve(max_tokens)
        except OutOfPages:
            if was_empty and self.num_tokens:
                self.num_tokens = 0
                for table in self.tables:
                    table.clear()
            raise
        self._text, self._num_remembered, self._has_stepped = text, 0, False

    def _begin_with_cached(self, text: ExpectedText, max_tokens: int) -> None:
        page_tokens = self.pool.page_tokens
        num_pages = min(len(text.hashes), max(0, text.num_tokens - 1) // page_tokens, max_tokens // page_tokens)
        hashes = text.hashes[:num_pages]
        groups = range(len(self.tables))
        found = [[self.pool.find(PrefixKey(text.salt, each, group)) for each in hashes] for group in groups]
        needed = [table.num_needed_pages() for table in self.tables]
        num_matched = longest_match([[page is not None for page in pages] for pages in found], needed)
        self.pool.count_prefix_query(num_pages * page_tokens, num_matched * page_tokens)
        if num_matched:
            for table, pages, num_needed in zip(self.tables, found, needed, strict=True):
                num_passed = 0 if num_needed is None else max(0, num_matched - num_needed)
                table.match(num_passed, [page for page in pages[num_passed:num_matched] if page is not None])
            self.num_tokens = num_matched * page_tokens

    def make_writable(self, position: int, num_tokens: int) -> Copies:
        """Makes the pages of a step's tokens present and writable.

        Returns:
            Pages to copy first, in all layers.

        Raises:
            OutOfPages: the step goes beyond what was reserved, and there is no more.
        """
        end = position + num_tokens
        if end > self.num_reserved_tokens:
            self.reserve(max(end, self.num_tokens))
        copies: Copies = []
        for table in self.tables:
            copies += table.make_writable(position, num_tokens)
        return copies

    def commit(self, num_tokens: int) -> None:
        """The tokens up to `num_tokens` are computed: whole pages of them may be reused, others let go."""
        self.num_tokens = num_tokens
        self._has_stepped = True
        if self._text is not None:
            self._remember(self._text, num_tokens // self.pool.page_tokens)
        for table in self.tables:
            table.slide(num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens from position `num_tokens` on; pages stay.

        Raises:
            ValueError: the session cannot go on from there.
        """
        if not self.can_continue_from(num_tokens):
            raise ValueError(f"cannot truncate a cache of {self.num_tokens} tokens to {num_tokens}")
        if num_tokens == self.num_tokens:
            return
        self.num_tokens = num_tokens
        num_whole = num_tokens // self.pool.page_tokens
        self._num_remembered = min(self._num_remembered, num_whole)
        if self._has_stepped and self._text is not None:
            # From here on the text is another one than was said.
            self._text = replace(self._text, hashes=self._text.hashes[:num_whole])

    def clear(self) -> None:
        """Gives everything back, the room too."""
        self.num_tokens = 0
        self._text = None
        for table in self.tables:
            table.clear()
        self.reserve(0)

    def fork(self) -> Self:
        """The same tokens, on the same pages, without any room; to be adopted or cleared before the next step."""
        twin = self._empty()
        twin.tables = tuple(table.share(self.num_tokens) for table in self.tables)
        twin._describe(self)
        return twin

    def adopt(self, twin: Self) -> None:
        """Holds what the twin held, which is empty afterwards; the room stays its own."""
        for table, theirs in zip(self.tables, twin.tables, strict=True):
            table.adopt(theirs, twin.num_tokens)
        self._describe(twin)
        twin.num_tokens = 0

    def extents(self, end: int, start: int = 0, group: int = 0) -> tuple[Extent, ...]:
        """The slots of positions `[start, end)`, in order, merged into runs.

        Raises:
            ValueError: not all of them are held.
        """
        return self.tables[group].extents(start, end)

    def slots(self, position: int, num_tokens: int, group: int = 0) -> Sequence[int]:
        """The slots of these positions, one by one. Raises ValueError where they are not all held."""
        extents = self.tables[group].extents(position, position + num_tokens)
        if len(extents) == 1:
            return range(extents[0][0], extents[0][0] + num_tokens)
        return [slot for first, count in extents for slot in range(first, first + count)]

    def _remember(self, text: ExpectedText, num_whole: int) -> None:
        num_whole = min(num_whole, len(text.hashes))
        for index in range(self._num_remembered, num_whole):
            for group, table in enumerate(self.tables):
                if (page := table.page(index)) is not None:
                    self.pool.remember(PrefixKey(text.salt, text.hashes[index], group), page)
        self._num_remembered = max(self._num_remembered, num_whole)

    def _describe(self, other: "SessionPages") -> None:
        self.num_tokens, self._text = other.num_tokens, other._text
        self._num_remembered, self._has_stepped = other._num_remembered, other._has_stepped

    def _empty(self) -> Self:
        return type(self)(self.pool, self._rules)
