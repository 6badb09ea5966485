"""Exact accounting of the server's KV pages: who may have how many, and who holds which. Pure."""

from collections.abc import Sequence

from corolla.block_server.kv.prefixes import PrefixKey, PrefixPages
from corolla.block_server.kv.runs import FreeRuns
from corolla.chassis.errors import OutOfPages


def too_few_pages(num_needed: int, num_available: int) -> OutOfPages:
    """The refusal of a request that needs more pages than there are for it."""
    return OutOfPages(
        "a block server has too few free KV pages for this request",
        metadata={"pages_needed": str(num_needed), "pages_free": str(num_available)},
    )


class PagePool:
    """`num_pages` pages of `page_tokens` tokens, with reference counts.

    A session is promised pages for its worst case, and then holds page ids within its promise. Sessions may hold pages
    together; each could come to need pages of its own for all of them, so the promises add up in full.

    Invariants: each page is used (held by somebody), cached (it holds the beginning of some text, and nobody uses it)
    or free. Used, reserved (promised, and not held) and available pages add up to the pool, and no more pages are
    cached than are available; so whoever was promised a page finds a free one.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ValueError("a pool has at least one page of at least one token")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = FreeRuns(num_pages)
        self._num_holders = [0] * num_pages
        self._num_promised = 0
        self._num_used = 0
        self._prefixes = PrefixPages()
        self.num_prefix_tokens_asked = 0
        self.num_prefix_tokens_found = 0

    @property
    def num_used(self) -> int:
        """Pages that sessions hold; a shared one counts once."""
        return self._num_used

    @property
    def num_reserved(self) -> int:
        """Pages that were promised and are not held."""
        return self._num_promised - self._num_used

    @property
    def num_cached(self) -> int:
        """Pages that only wait for the beginning of their text to come again."""
        return self._prefixes.num_evictable

    @property
    def num_free(self) -> int:
        """Pages that nobody holds or was promised, and that hold nothing."""
        return self.num_available - self.num_cached

    @property
    def num_available(self) -> int:
        """Pages that may be promised."""
        return self.num_pages - self._num_promised

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens of one session."""
        return -(-num_tokens // self.page_tokens)

    def promise(self, num_pages: int) -> None:
        """Promises so many more pages; fewer, where negative.

        Raises:
            OutOfPages: fewer are available; nothing changed.
        """
        if num_pages > self.num_available:
            raise too_few_pages(num_pages, self.num_available)
        self._num_promised += num_pages
        self._evict()

    def take(self, num_pages: int, after: int | None = None) -> list[int]:
        """Page ids within a promise, in as few runs as can be; one that follows page `after` comes first."""
        pages = self._free.take(num_pages, after)
        for page in pages:
            self._num_holders[page] = 1
        self._num_used += num_pages
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more session holds these pages."""
        for page in pages:
            if not self._num_holders[page]:
                if page not in self._prefixes:
                    raise ValueError("a free page cannot be shared")
                self._prefixes.wake(page)
                self._num_used += 1
            self._num_holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """One session fewer holds these pages. Of a text's pages the last ones will be evicted first."""
        free: list[int] = []
        for page in reversed(pages):
            if not self._num_holders[page]:
                raise ValueError("a page came back that nobody held")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                self._num_used -= 1
                if page in self._prefixes:
                    self._prefixes.rest(page)
                else:
                    free.append(page)
        self._free.give(free[::-1])
        self._evict()

    def may_write(self, page: int) -> bool:
        """Whether its only holder may write to a page; what it held is then not found any more."""
        if self._num_holders[page] > 1:
            return False
        self._prefixes.forget(page)
        return True

    def remember(self, key: PrefixKey, page: int) -> None:
        """The page that somebody holds is whole and will not change while it is known by this key."""
        self._prefixes.add(key, page)

    def find(self, key: PrefixKey) -> int | None:
        """The page that holds this, if there is one; valid until the next promise or drop, unless shared before."""
        return self._prefixes.find(key)

    def count_prefix_query(self, num_asked: int, num_found: int) -> None:
        """Tokens that a session looked for in the prefix cache, and those of them that were there."""
        self.num_prefix_tokens_asked += num_asked
        self.num_prefix_tokens_found += num_found

    def _evict(self) -> None:
        while self.num_cached > self.num_available:
            self._free.give([self._prefixes.evict()])
