"""Remembers which pages hold which beginnings of texts. Pure: the pool owns the pages."""

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
        salt: digest of tenant, run of blocks, adapter and factors; pages of others are never found.
        block_hash: chained hash of the page's tokens.
        group: the group of layers, each of which has pages of its own.
    """

    salt: bytes
    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """The text that a session is expected to hold.

    Attributes:
        salt: `salt_of` its tenant, blocks, adapter and factors.
        hashes: chained hashes, one for each whole page of the text.
        num_tokens: the length of the text; its last token is always left to be computed.
    """

    salt: bytes
    hashes: tuple[bytes, ...]
    num_tokens: int


def salt_of(tenant: str, blocks: Span, adapter: AdapterVersion | None = None, *, long_factors: bool = False) -> bytes:
    """Returns the salt that separates the pages of tenants, runs of blocks, adapters and factors.

    Weights are not part of it, since all weights of a server have one fingerprint.

    Args:
        long_factors: whether the long factors of a longrope embedding are used.
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

        Returns:
            The unused page that had this key and was forgotten for the new one. It would be evicted before the pages
            that follow it, which are useless without it.
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
        """Forgets the least recently used page and returns it."""
        page = next(iter(self._evictable))
        self.forget(page)
        return page


def longest_match(is_cached: Sequence[Sequence[bool]], num_needed: Sequence[int | None]) -> int:
    """Returns how many first pages of a text can be reused.

    Args:
        is_cached: for each group of layers, whether each of the text's whole pages is cached.
        num_needed: for each group, how many pages directly before the next token it attends to; None for all.
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
