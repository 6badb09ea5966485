"""Keeps track of what one session holds: its number of tokens, and a page table for each group of layers. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Self

from corolla.cache.pages import PagePool, too_few_pages
from corolla.cache.prefixes import ExpectedText, PrefixKey, PrefixKeys, PrefixName, longest_match
from corolla.cache.tables import Copies, Extent, GroupRule, PageTable

MAX_TOKENS: Final = 2**31 - 1
"""The most tokens of a session."""

_Match = tuple[int, list[list[int]]]
"""How many whole pages of a text the prefix cache has, and those that each group of layers needs of them."""


class SessionPages:
    """What one session holds: its number of tokens, and a page table for each group of layers.

    Args:
        rules: the rules of the groups of layers.
        num_fixed_pages: how many pages are promised to a session for data that does not grow with its tokens, such as
            recurrent states.

    Attributes:
        write_start: the session holds whole pages of its text before this position in common: it will not write to them
            until it is allocated again.
        num_unchanged_tokens: how many of the first tokens have not changed since a caller set this number. A handover
            sets it after each part that it copies, and continues there.
    """

    def __init__(self, pool: PagePool, rules: Sequence[GroupRule], num_fixed_pages: int = 0) -> None:
        self.pool = pool
        self.num_fixed_pages = num_fixed_pages
        self._num_fixed_promised = 0
        self._rules = tuple(rules)
        self._keys = PrefixKeys([rule.window for rule in rules])
        self.num_unchanged_tokens = 0
        self.tables = tuple(PageTable(pool, rule) for rule in rules)
        self.num_tokens = 0
        self.num_reserved_tokens = 0
        self._text: ExpectedText | None = None
        # The last look-up: its text, its most tokens, the pool's version then, and what it found.
        self._looked_up: tuple[ExpectedText, int, int, _Match] | None = None
        self._num_remembered = 0
        self._has_stepped = False
        self.write_start = 0

    @property
    def num_pages(self) -> int:
        """The number of pages that the session was promised."""
        return sum(table.num_promised for table in self.tables) + self._num_fixed_promised

    @property
    def num_common_pages(self) -> int:
        """The number of pages that the session holds in common, outside its promise."""
        return sum(table.num_common for table in self.tables)

    @property
    def common_end(self) -> int:
        """The session may write from this position on; before an earlier one is written, `own_from` must be called."""
        return max(table.num_common for table in self.tables) * self.pool.page_tokens

    @property
    def last_common_page(self) -> PrefixKey | None:
        """The name of the last page that is held in common, which stands for those before it, too; None: none is."""
        num_common = max(table.num_common for table in self.tables)
        if self._text is None or not 0 < num_common <= len(self._text.hashes):
            return None
        return PrefixKey(self._text.salt, self._text.hashes[num_common - 1], 0)

    @property
    def known_text(self) -> ExpectedText | None:
        """The digests of the whole pages that are held, as far as they are known; None: none is."""
        if self._text is None:
            return None
        num_whole = self.num_tokens // self.pool.page_tokens
        return replace(self._text, hashes=self._text.hashes[:num_whole], num_tokens=self.num_tokens)

    def charge_to(self, account: str | None) -> None:
        """Charges an account for the pages held in common; None: no account is charged for this session's."""
        for table in self.tables:
            table.charge_to(account)

    def own_from(self, position: int) -> None:
        """Gets a promise for the pages held in common that a step from this position on writes.

        Raises:
            OutOfPages: the pool has too few pages for copies. No token is lost.
        """
        for table in self.tables:
            table.own_from(position // self.pool.page_tokens)

    @property
    def min_position(self) -> int:
        """The session can continue from each position in `[min_position, num_tokens]`, and from 0."""
        return self._min_paged_position

    @property
    def _min_paged_position(self) -> int:
        return max([table.min_position for table in self.tables])

    def can_continue_from(self, position: int) -> bool:
        return position == 0 or self._min_paged_position <= position <= self.num_tokens

    def nearest_position(self, position: int) -> int:
        """The highest position, up to `position`, from which the session can continue."""
        position = min(position, self.num_tokens)
        return position if self.can_continue_from(position) else 0

    def worst_case(self, max_tokens: int) -> int:
        """The most pages that a session of `max_tokens` tokens may hold at once."""
        return sum(table.worst_case(max_tokens) for table in self.tables) + self._fixed_pages(max_tokens)

    def num_missing(
        self,
        max_tokens: int,
        text: ExpectedText | None = None,
        write_start: int = 0,
        *,
        is_kept: bool = False,
        counts_uncharged: bool = True,
    ) -> int:
        """How many pages `allocate` takes from those that are available, apart from what the session holds.

        Args:
            is_kept: whether the session keeps its tokens; otherwise it is cleared before.
            counts_uncharged: whether pages held in common count that no account is charged for; otherwise they are
                taken as available.
        """
        match = self._cached(None if is_kept and self.num_tokens else text, max_tokens)
        return self._num_missing(max_tokens, match, write_start, is_kept=is_kept, counts_uncharged=counts_uncharged)

    def _num_missing(
        self, max_tokens: int, match: _Match, write_start: int, *, is_kept: bool, counts_uncharged: bool = True
    ) -> int:
        readers = self.pool.readers if counts_uncharged else self.pool.charged_readers
        num_common = write_start // self.pool.page_tokens
        num_missing = -self.num_pages + self._fixed_pages(max_tokens)
        num_matched, cached = match
        for group, table in enumerate(self.tables):
            held = table.pages[: table.num_common]
            own = set(held) if counts_uncharged or table.account is not None else set[int]()
            common: Sequence[int] = ()
            if num_matched and not table.has_window:
                common = cached[group][:num_common]
            elif is_kept:
                common = held[: min(num_common, self.pool.pages_for(max_tokens))]
            num_kept = table.num_written_pages(min(self.num_tokens, max_tokens)) if is_kept else 0
            num_missing += max(table.worst_case(max_tokens), num_kept)
            num_missing -= sum(readers[page] > (page in own) for page in common)
            num_missing -= sum(readers[page] == 1 for page in own)
        return num_missing

    def max_tokens_within(self, num_pages: int) -> int:
        """The length of the longest session whose worst case is at most `num_pages`.

        It is `MAX_TOKENS` where sliding windows keep even the longest session below that.
        """
        return bisect_right(range(MAX_TOKENS + 1), num_pages, key=self.worst_case) - 1

    def reserve(self, max_tokens: int) -> None:
        """Changes the promised pages to the worst case of `max_tokens` tokens.

        Raises:
            OutOfPages: the pool has too few pages; nothing has changed.
            ValueError: the session holds more than `max_tokens` tokens.
        """
        if max_tokens < self.num_tokens:
            raise ValueError(f"{self.num_tokens} tokens do not fit where {max_tokens} are reserved")
        most_common = min(self.write_start // self.pool.page_tokens, self.pool.pages_for(max_tokens))
        num_common = [min(table.num_common, most_common) for table in self.tables]
        wanted = [
            max(table.worst_case(max_tokens), table.num_written_pages(self.num_tokens)) - num_read
            for table, num_read in zip(self.tables, num_common, strict=True)
        ]
        num_fixed = self._fixed_pages(max_tokens)
        num_more = sum(wanted) + num_fixed - self.num_pages
        owned = [
            page
            for table, count in zip(self.tables, num_common, strict=True)
            for page in table.pages[count : table.num_common]
        ]
        # Promises are taken back before the pages, or a full pool would evict what the session leaves.
        self.pool.stop_reading(owned, self.tables[0].account, num_promised=num_more)
        for table, num_pages, count in zip(self.tables, wanted, num_common, strict=True):
            table.num_promised, table.num_common = num_pages, count
            table.resize(max_tokens)
        self._num_fixed_promised = num_fixed
        self.num_reserved_tokens = max_tokens

    def allocate(
        self,
        max_tokens: int | None,
        text: ExpectedText | None = None,
        write_start: int = 0,
        *,
        is_copied: bool = False,
    ) -> None:
        """Reserves pages for `max_tokens` tokens. An empty session first gets what the prefix cache has of its text.

        Args:
            max_tokens: None for a standby, which reserves pages only for what it holds.
            write_start: see `SessionPages`; 0: the session may write to all of its pages.
            is_copied: whether another server computes the tokens, so that their pages have no names.

        Raises:
            OutOfPages: the pool has too few pages; the session holds what it held before.
        """
        to_find = None if self.num_tokens else text
        num_known = 0 if text is None else text.num_tokens
        most_tokens = num_known if max_tokens is None else max_tokens
        match = num_matched, cached = self._cached(to_find, most_tokens)
        num_tokens = num_matched * self.pool.page_tokens or self.num_tokens
        num_reserved = num_tokens if max_tokens is None else max_tokens
        num_missing = self._num_missing(num_reserved, match, write_start, is_kept=True)
        if num_missing > self.pool.num_available:
            raise too_few_pages(num_missing, self.pool.num_available)
        self.write_start = write_start
        if to_find is not None:
            num_asked = len(self._hashes_to_find(to_find, most_tokens))
            self.pool.num_prefix_tokens_asked += num_asked * self.pool.page_tokens
            self.pool.num_prefix_tokens_found += num_tokens
        if to_find is not None and num_matched:
            self._begin_with(to_find, num_matched, cached)
        self.reserve(num_reserved)
        self._text = None if is_copied else text
        self._looked_up, self._num_remembered, self._has_stepped = None, 0, False

    def _begin_with(self, text: ExpectedText, num_matched: int, cached: Sequence[Sequence[int]]) -> None:
        """Holds pages of the prefix cache in place of all that the session has, its promise included."""
        for pages in cached:
            # What is held is not evicted when the session gives back what it had.
            self.pool.share(pages)
        self.clear()
        self.num_tokens = num_matched * self.pool.page_tokens
        for table, pages in zip(self.tables, cached, strict=True):
            table.hold_cached(table.num_passed_pages(num_matched), pages, self.write_start // self.pool.page_tokens)

    def has_beginning(self, last_page: PrefixKey) -> bool:
        """An empty session whose text begins with the pages up to this one may continue from there."""
        return self.pool.has_prefix(last_page)

    def num_found_tokens(self, text: ExpectedText | None, max_tokens: int) -> int:
        """How many tokens of the text an empty session would get from the prefix cache."""
        return self._cached(text, max_tokens)[0] * self.pool.page_tokens

    def _cached(self, text: ExpectedText | None, max_tokens: int) -> _Match:
        """What the prefix cache has of a text. An open asks twice, and it is looked up again only after evictions."""
        if text is None:
            return 0, []
        if (last := self._looked_up) is not None and last[0] is text and last[1:3] == (max_tokens, self.pool.version):
            return last[3]
        hashes = self._hashes_to_find(text, max_tokens)
        found = self._found(text.salt, hashes)
        num_matched = self._num_matched(text.salt, hashes, [[page is not None for page in pages] for pages in found])
        first = [table.num_passed_pages(num_matched) for table in self.tables]
        needed = [pages[start:num_matched] for start, pages in zip(first, found, strict=True)]
        match = num_matched, [[page for page in pages if page is not None] for pages in needed]
        self._looked_up = text, max_tokens, self.pool.version, match
        return match

    def pages_to_return(self, text: ExpectedText, max_tokens: int) -> list[PrefixName]:
        """The pages in the memory of the machine with which a session would find more of its text, in their order.

        There are no more than the pool has room for next to what it has of this text.
        """
        if (host := self.pool.host) is None:
            return []
        hashes = self._hashes_to_find(text, max_tokens)
        found = self._found(text.salt, hashes)
        num_matched = self._num_matched(
            text.salt,
            hashes,
            [
                [
                    page is not None or PrefixKey(text.salt, each, group) in host
                    for each, page in zip(hashes, pages, strict=True)
                ]
                for group, pages in enumerate(found)
            ],
        )
        num_passed = [table.num_passed_pages(num_matched) for table in self.tables]
        missing = [
            (key, before)
            for index in range(num_matched)
            for key, before in self._keys.of_page(text.salt, hashes, index)
            if index >= num_passed[key.group] and found[key.group][index] is None
        ]
        held = {page for pages in found for page in pages if page is not None}
        num_unused = sum(not self.pool.holders[page] for page in held)
        return missing[: max(0, self.pool.num_available - num_unused)]

    def _hashes_to_find(self, text: ExpectedText, max_tokens: int) -> Sequence[bytes]:
        """Returns the digests of the pages that may hold the beginning of the session's text."""
        page_tokens = self.pool.page_tokens
        return text.hashes[: min(max(0, text.num_tokens - 1) // page_tokens, max_tokens // page_tokens)]

    def _found(self, salt: bytes, hashes: Sequence[bytes]) -> list[list[int | None]]:
        """The pages of these digests that the prefix cache has, for each group."""
        groups = range(len(self.tables))
        return [[self.pool.find_prefix(PrefixKey(salt, each, group)) for each in hashes] for group in groups]

    def _num_matched(self, salt: bytes, hashes: Sequence[bytes], is_there: Sequence[Sequence[bool]]) -> int:
        """How many pages at the beginning of a text an empty session continues from, if these are there."""
        return longest_match(is_there, [table.num_needed_pages() for table in self.tables])

    def make_writable(self, position: int, num_tokens: int) -> Copies:
        """Makes sure that the pages of a step's tokens exist and may be written.

        Returns:
            The pairs of pages to copy, in all layers, before the step writes.

        Raises:
            OutOfPages: the step exceeds the reserved tokens, or writes to pages held in common, and the pool has too
                few pages.
        """
        end = position + num_tokens
        if end > self.num_reserved_tokens:
            self.reserve(max(end, self.num_tokens))
        copies: Copies = []
        for table in self.tables:
            copies += table.make_writable(position, num_tokens)
        return copies

    def commit(self, num_tokens: int) -> None:
        """Notes that the first `num_tokens` tokens are computed.

        Other sessions may then reuse the whole pages among them, and the pages before a sliding window are given back.
        """
        self.num_tokens = num_tokens
        self._has_stepped = True
        if self._text is not None:
            self._remember(self._text, num_tokens // self.pool.page_tokens)
        for table in self.tables:
            table.slide(num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Forgets all tokens from position `num_tokens` on; the session keeps their pages.

        Raises:
            ValueError: the session cannot continue from there.
        """
        if num_tokens == self.num_tokens:
            return
        if not self.can_continue_from(num_tokens):
            raise ValueError(f"cannot truncate a cache of {self.num_tokens} tokens to {num_tokens}")
        self.num_tokens = num_tokens
        self.num_unchanged_tokens = min(self.num_unchanged_tokens, num_tokens)
        num_whole = num_tokens // self.pool.page_tokens
        self._num_remembered = min(self._num_remembered, num_whole)
        if self._has_stepped and self._text is not None:
            # The text after this position may differ from the expected text.
            self._text = replace(self._text, hashes=self._text.hashes[:num_whole])

    def set_page_hashes(self, salt: bytes, hashes: Sequence[bytes]) -> None:
        """Notes the digests of the first whole pages, so that other sessions may reuse these pages."""
        num_whole = min(len(hashes), self.num_tokens // self.pool.page_tokens)
        self._text = ExpectedText(salt, tuple(hashes[:num_whole]), num_whole * self.pool.page_tokens)
        self._remember(self._text, num_whole)

    def clear(self) -> None:
        """Forgets all tokens and gives all pages back, the promised ones included."""
        self.num_tokens = self.num_unchanged_tokens = 0
        self._text = None
        self.pool.promise(-self.num_pages)
        for table in self.tables:
            table.num_promised = 0
        self._num_fixed_promised = self.num_reserved_tokens = 0
        self._give_back()

    def fork(self) -> Self:
        """Returns a twin that holds the same tokens and pages, but has no pages promised.

        Another session must adopt it, or it must be cleared, before the next step.
        """
        twin = self._empty()
        twin.tables = tuple(table.share(self.num_tokens) for table in self.tables)
        twin._take_account(self)
        return twin

    def adopt(self, twin: Self) -> None:
        """Takes the tokens and pages of a twin, which is empty afterwards. This session keeps its promised pages.

        Raises:
            OutOfPages: the twin holds fewer pages in common, and the pool has too few for copies; no token is lost.
        """
        # Two sessions hold the same page only if its tokens are the same.
        num_same = min(mine.num_same_tokens(theirs) for mine, theirs in zip(self.tables, twin.tables, strict=True))
        num_pages = min(self.write_start, twin.num_tokens) // self.pool.page_tokens
        num_common = [min(theirs.num_common, num_pages) for theirs in twin.tables]
        for table, count in zip(self.tables, num_common, strict=True):
            table.own_from(count)
        for table, theirs, count in zip(self.tables, twin.tables, num_common, strict=True):
            table.adopt(theirs, twin.num_tokens, count)
        self.num_unchanged_tokens = min(self.num_unchanged_tokens, self.num_tokens, num_same)
        self._take_account(twin)
        twin.num_tokens = 0

    def extents(self, end: int, start: int = 0, group: int = 0) -> tuple[Extent, ...]:
        """Returns the slots of positions `[start, end)`, in order, merged into runs.

        Raises:
            ValueError: the session does not hold all of them.
        """
        return self.tables[group].extents(start, end)

    def slots(self, position: int, num_tokens: int, group: int = 0) -> Sequence[int]:
        """Returns the slots of these positions, one by one. Raises ValueError if they are not all held."""
        if num_tokens == 1:
            return (self.tables[group].slot(position),)
        extents = self.tables[group].extents(position, position + num_tokens)
        if len(extents) == 1:
            return range(extents[0][0], extents[0][0] + num_tokens)
        return [slot for first, count in extents for slot in range(first, first + count)]

    def _remember(self, text: ExpectedText, num_whole: int) -> None:
        num_whole = min(num_whole, len(text.hashes))
        for index in range(self._num_remembered, num_whole):
            for key, before in self._keys.of_page(text.salt, text.hashes, index):
                if (page := self.tables[key.group].whole_page(index)) is not None:
                    self.pool.add_prefix(key, page, before)
        self._num_remembered = max(self._num_remembered, num_whole)
        for table in self.tables:
            table.hold_in_common(min(num_whole, self.write_start // self.pool.page_tokens))

    def _give_back(self) -> None:
        """Gives all held pages back in the order of their text, so that none comes before one that it needs."""
        tables = [self.tables[group] for group in self._keys.groups]
        for table in tables:
            table.stop_reading(0)
        indices = range(min(table.first_index for table in tables), max(table.end_index for table in tables))
        pages = (table.page(index) for index in indices for table in tables)
        self.pool.release([page for page in pages if page is not None])
        for table in tables:
            table.drop()

    def _take_account(self, other: "SessionPages") -> None:
        self.num_tokens, self._text = other.num_tokens, other._text
        self._num_remembered, self._has_stepped = other._num_remembered, other._has_stepped

    def _fixed_pages(self, max_tokens: int) -> int:
        return self.num_fixed_pages if max_tokens else 0

    def _empty(self) -> Self:
        return type(self)(self.pool, self._rules, self.num_fixed_pages)
