"""Remembers which page holds which part of a text's beginning. Pure: the pool owns the pages."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.page_hashes import HASH_BYTES
from corolla.wire.span import Span


class PrefixKey(NamedTuple):
    """Identifies the contents of one whole page and of all pages before it.

    Attributes:
        salt: the digest that `salt_of` makes. Sessions with different salts never find each other's pages.
        block_hash: hash of the page's tokens and of all tokens before them.
        group: the index of a group of layers; each group has pages of its own.
    """

    salt: bytes
    block_hash: bytes
    group: int


PrefixName = tuple[PrefixKey, PrefixKey | None]
"""The key of a page, and the key that it is of no use without."""


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """The text that a session is expected to hold.

    Attributes:
        salt: the digest that `salt_of` makes from tenant, blocks, adapter and factors.
        hashes: one for each whole page of the text: the hash of its tokens and of all tokens before them.
        num_tokens: the length of the text. A session always computes the last token itself.
    """

    salt: bytes
    hashes: tuple[bytes, ...]
    num_tokens: int


def salt_of(tenant: str, blocks: Span, adapter: AdapterVersion | None = None, *, long_factors: bool = False) -> bytes:
    """Returns the salt that keeps apart the pages of different tenants, runs of blocks, adapters and factors.

    Weights need not be part of it, since a server has the weights of one model only.

    Args:
        long_factors: whether the session uses the long factors of a longrope embedding.
    """
    digest = "" if adapter is None else adapter.digest
    if long_factors:
        digest += "+long"
    text = f"{blocks.start}:{blocks.end}:{digest}:{tenant}".encode()
    return hashlib.blake2b(text, digest_size=HASH_BYTES).digest()


class PrefixKeys:
    """Names the pages of texts, and says which page is of no use without which.

    A whole page of a text has a part for each group of layers. The parts of groups without a window form one chain over
    all pages of the text; a part with a window needs the other parts of its page.

    Args:
        windows: the window of each group; None for a group whose tokens see all earlier ones.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self._whole = [group for group, window in enumerate(windows) if window is None]
        self._windowed = [group for group, window in enumerate(windows) if window is not None]

    @property
    def groups(self) -> Sequence[int]:
        """The groups in an order in which each needs only earlier ones."""
        return (*self._whole, *self._windowed)

    def of_page(self, salt: bytes, hashes: Sequence[bytes], index: int) -> Iterator[PrefixName]:
        """Yields the names of page `index` in the order of `groups`."""
        before = PrefixKey(salt, hashes[index - 1], self._whole[-1]) if index and self._whole else None
        for group in self._whole:
            key = PrefixKey(salt, hashes[index], group)
            yield key, before
            before = key
        for group in self._windowed:
            yield PrefixKey(salt, hashes[index], group), before if self._whole else None


@dataclass(eq=False, slots=True)
class _Entry:
    """The pages with one key: one page, or several that sessions hold."""

    key: PrefixKey
    before: "_Entry | None"
    pages: list[int] = field(default_factory=list)
    following: "dict[_Entry, None]" = field(default_factory=dict)


class PrefixPages:
    """Maps keys to pages, and orders the pages that no session uses: the next one to evict comes first.

    Texts that were used least recently are evicted first, and each from its end.

    Invariants: a page has at most one key; a key has one page, or several that sessions use; evictable pages have keys.
    A key is only there together with the key that it is of no use without. An evictable page comes after those that are
    of no use without it.
    """

    def __init__(self) -> None:
        self._entries: dict[PrefixKey, _Entry] = {}
        self._of_pages: dict[int, _Entry] = {}
        self._evictable: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def __contains__(self, page: int) -> bool:
        return page in self._of_pages

    def find(self, key: PrefixKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.pages[0]

    def add(self, key: PrefixKey, page: int, before: PrefixKey | None) -> int | None:
        """Remembers the key of a page in use, unless the page has a key or the key `before` is not there.

        If an unused page has the key, the new page takes it over. The unused page could be evicted at any time, and
        then nothing would find the pages that follow it in the text.

        Returns:
            The unused page that has lost the key; None if there was none, or if nothing was remembered.
        """
        if page in self._of_pages:
            return None
        replaced = None
        entry = self._entries.get(key)
        if entry is None:
            previous = None if before is None else self._entries.get(before)
            if before is not None and previous is None:
                return None
            entry = self._entries[key] = _Entry(key, previous)
            if previous is not None:
                previous.following[entry] = None
        elif entry.pages[0] in self._evictable:
            replaced = entry.pages.pop()
            del self._of_pages[replaced], self._evictable[replaced]
        entry.pages.append(page)
        self._of_pages[page] = entry
        return replaced

    def forget(self, page: int) -> list[int]:
        """Forgets a page whose contents are about to change, and all that nothing would find without it.

        Returns:
            The other pages that no session uses and that are forgotten now.
        """
        entry = self._of_pages.pop(page, None)
        if entry is None:
            return []
        self._evictable.pop(page, None)
        entry.pages.remove(page)
        if entry.pages:
            return []
        if entry.before is not None:
            del entry.before.following[entry]
        unused = []
        lost = [entry]
        while lost:
            entry = lost.pop()
            del self._entries[entry.key]
            lost += entry.following
            for each in entry.pages:
                del self._of_pages[each]
                if each in self._evictable:
                    del self._evictable[each]
                    unused.append(each)
        return unused

    def mark_unused(self, page: int) -> bool:
        """Notes that no session uses the page any more, so that it may be evicted. Returns whether it is kept.

        It is not kept without a key, or if a session uses another page with the same key. Unused pages that it is of no
        use without are renewed with it.
        """
        entry = self._of_pages.get(page)
        if entry is None:
            return False
        if len(entry.pages) > 1:
            entry.pages.remove(page)
            del self._of_pages[page]
            return False
        self._evictable[page] = None
        self.renew(page)
        return True

    def renew(self, page: int) -> None:
        """Makes an unused page, and the unused ones that it is of no use without, the last to be evicted."""
        entry: _Entry | None = self._of_pages[page]
        while entry is not None and entry.pages[0] in self._evictable:
            self._evictable[entry.pages[0]] = self._evictable.pop(entry.pages[0])
            entry = entry.before

    def mark_used(self, page: int) -> None:
        """Notes that a session uses the page again."""
        self._evictable.pop(page, None)

    def evict(self) -> tuple[PrefixKey, list[int]]:
        """Forgets the next page to evict. Returns its key, and the page with those that nothing finds without it."""
        page = next(iter(self._evictable))
        key = self._of_pages[page].key
        return key, [page, *self.forget(page)]


def longest_match(is_cached: Sequence[Sequence[bool]], num_needed: Sequence[int | None]) -> int:
    """Returns how many pages at the beginning of a text can be reused.

    Args:
        is_cached: for each group of layers, whether each of the text's whole pages is cached.
        num_needed: for each group, how many pages directly before a page its first token sees; None for all.
    """
    if all(needed is None for needed in num_needed):
        return sum(1 for _ in takewhile(all, zip(*is_cached, strict=False)))
    num_pages = min(map(len, is_cached), default=0)
    best = 0
    in_a_row = [0] * len(is_cached)
    for count in range(1, num_pages + 1):
        for group, cached in enumerate(is_cached):
            in_a_row[group] = in_a_row[group] + 1 if cached[count - 1] else 0
        if all(
            row >= (count if needed is None else min(count, needed))
            for row, needed in zip(in_a_row, num_needed, strict=True)
        ):
            best = count
    return best
