"""Remembers which page holds which part of a text's beginning. Pure: the pool owns the pages."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from corolla.wire.adapter_version import AdapterVersion
from corolla.wire.page_hashes import HASH_BYTES
from corolla.wire.span import Span


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Identifies the contents of one whole page and of all pages before it.

    Attributes:
        salt: the digest that `salt_of` makes. Sessions with different salts never find each other's pages.
        block_hash: hash of the page's tokens and of all tokens before them.
        group: the index of a group of layers; each group has pages of its own.
    """

    salt: bytes
    block_hash: bytes
    group: int


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


class PrefixPages:
    """Maps keys to pages, and lists the pages that no session uses, least recently used first.

    Invariant: a page has at most one key, a key has at most one page, and evictable pages have keys.
    """

    def __init__(self) -> None:
        self._pages: dict[PrefixKey, int] = {}
        self._keys: dict[int, PrefixKey] = {}
        self._evictable: dict[int, None] = {}

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def find(self, key: PrefixKey) -> int | None:
        return self._pages.get(key)

    def add(self, key: PrefixKey, page: int) -> int | None:
        """Remembers the key of a page in use, unless the page has a key or another page in use has this key.

        If an unused page has the key, the new page takes it over. The unused page could be evicted at any time, and
        then nothing would find the cached pages that follow it in the text.

        Returns:
            The unused page that has lost the key; None if there was none, or if nothing was remembered.
        """
        if page in self._keys:
            return None
        other = self._pages.get(key)
        if other is not None:
            if other not in self._evictable:
                return None
            self.forget(other)
        self._pages[key] = page
        self._keys[page] = key
        return other

    def forget(self, page: int) -> None:
        """Forgets a page whose contents are about to change."""
        key = self._keys.pop(page, None)
        if key is not None:
            del self._pages[key]
            self._evictable.pop(page, None)

    def mark_unused(self, page: int) -> None:
        """Notes that no session uses the page any more, so that it may be evicted."""
        self._evictable[page] = None

    def mark_used(self, page: int) -> None:
        """Notes that a session uses the page again."""
        self._evictable.pop(page, None)

    def evict(self) -> int:
        """Forgets the least recently used of the pages that no session uses, and returns it."""
        page = next(iter(self._evictable))
        self.forget(page)
        return page


def longest_match(is_cached: Sequence[Sequence[bool]], num_needed: Sequence[int | None]) -> int:
    """Returns how many pages at the beginning of a text can be reused.

    Args:
        is_cached: for each group of layers, whether each of the text's whole pages is cached.
        num_needed: for each group, how many pages directly before a page its first token sees; None for all.
    """
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
