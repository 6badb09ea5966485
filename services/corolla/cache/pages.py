"""Counts the server's KV pages exactly: promises, holders and free ids. Pure."""

from collections import Counter
from collections.abc import Sequence

from corolla.cache.host_pages import HostPages
from corolla.cache.prefixes import PrefixKey, PrefixPages
from corolla.cache.runs import FreeRuns
from corolla.chassis.errors import OutOfPages


def too_few_pages(num_needed: int, num_available: int) -> OutOfPages:
    """The error for a request that needs more pages than are available for it."""
    return OutOfPages(
        "a block server has too few free KV pages for this request",
        metadata={"pages_needed": str(num_needed), "pages_free": str(num_available)},
    )


class PagePool:
    """A pool of `num_pages` pages of `page_tokens` tokens, with reference counts.

    A session is promised as many pages as it may write to, and then holds page ids within its promise. Sessions may
    share pages. A session holds a page either within its promise, so that it may write to it or to a copy, or in
    common: it only reads the page. A page counts once for all sessions that hold it in common. Each of these may name
    an account, which is then charged for the page; all accounts of one page are the same.

    Invariants: each page is used (a session holds it), cached (no session holds it, and it keeps the beginning of a
    text) or unused. Promised pages, pages held in common and available pages add up to the pool. No more pages are
    used than are promised or held in common, and no more are cached than are available, so a promised page can always
    be allocated.

    Attributes:
        version: a number that changes whenever a promise or a holder changes.
        readers: for each page, how many sessions hold it in common.
        charged_readers: for each page, how many of these name an account.
        num_charged: for each account, the number of pages for which it is charged.
        host: remembers what the prefix cache evicts; None: that is lost.
        num_prefix_tokens_asked: how many tokens sessions looked for in the prefix cache.
        num_prefix_tokens_found: how many of them they found.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ValueError("a pool has at least one page of at least one token")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self._free = FreeRuns(num_pages)
        self._num_holders = [0] * num_pages
        self.readers = [0] * num_pages
        self.charged_readers = [0] * num_pages
        self.num_charged = Counter[str]()
        self._num_common = 0
        self._num_promised = 0
        self._num_used = 0
        self._prefixes = PrefixPages()
        self.version = 0
        self.host: HostPages | None = None
        self.num_prefix_tokens_asked = 0
        self.num_prefix_tokens_found = 0

    @property
    def num_used(self) -> int:
        """The number of pages that sessions hold; a shared page counts once."""
        return self._num_used

    @property
    def num_reserved(self) -> int:
        """The number of pages that are promised but not held."""
        return self._num_promised + self._num_common - self._num_used

    @property
    def num_common(self) -> int:
        """The number of pages that at least one session holds in common."""
        return self._num_common

    @property
    def num_uncharged(self) -> int:
        """The number of pages held in common for which no account is charged."""
        return self._num_common - self.num_charged.total()

    @property
    def num_cached(self) -> int:
        """The number of pages that no session holds, kept because another session may begin with the same text."""
        return self._prefixes.num_evictable

    @property
    def num_free(self) -> int:
        """The number of pages that are neither held, promised nor cached."""
        return self.num_available - self.num_cached

    @property
    def num_available(self) -> int:
        """The number of pages that may be promised."""
        return self.num_pages - self._num_promised - self._num_common

    @property
    def holders(self) -> Sequence[int]:
        """The number of sessions that hold each page."""
        return self._num_holders

    @property
    def num_unused(self) -> int:
        """The number of pages that are neither held nor cached, whether they are promised or not."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens of one session."""
        return -(-num_tokens // self.page_tokens)

    def promise(self, num_pages: int) -> None:
        """Promises `num_pages` more pages; a negative number takes promises back.

        Raises:
            OutOfPages: fewer pages are available; nothing has changed.
        """
        if num_pages > self.num_available:
            raise too_few_pages(num_pages, self.num_available)
        self._num_promised += num_pages
        self.version += 1
        self._evict()

    def allocate(self, num_pages: int, after: int | None = None, *, grows: bool = True) -> list[int]:
        """Takes page ids within a promise, in as few runs as possible. Those that follow page `after` come first.

        Args:
            grows: whether the text may go on behind these pages; then there is room for it where that is possible.
        """
        pages = self._free.allocate(num_pages, after, grows=grows)
        for page in pages:
            self._num_holders[page] = 1
        self._num_used += num_pages
        self.version += 1
        return pages

    def take(self, num_pages: int, after: int | None = None) -> list[int]:
        """Promises pages for contents that come from elsewhere, and allocates them. `give` ends both.

        Raises:
            OutOfPages: fewer pages are available; nothing has changed.
        """
        self.promise(num_pages)
        return self.allocate(num_pages, after)

    def give(self, pages: Sequence[int]) -> None:
        """Gives taken pages back, in the order of their text. Those that were added to the prefix cache stay there."""
        self._num_promised -= len(pages)
        self.release(pages)

    def share(self, pages: Sequence[int]) -> None:
        """Counts one more session that holds these pages."""
        self.version += 1
        for page in pages:
            if not self._num_holders[page]:
                if page not in self._prefixes:
                    raise ValueError("a free page cannot be shared")
                self._prefixes.mark_used(page)
                self._num_used += 1
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Counts one session less that holds these pages.

        Pages of the prefix cache are then the last to be evicted, and a text's last pages before its first. The walk
        over a text is short if its pages are released together, in their order.
        """
        self.version += 1
        free: list[int] = []
        for page in reversed(pages):
            if not self._num_holders[page]:
                raise ValueError("a page was released that no session held")
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                self._num_used -= 1
                if not self._prefixes.mark_unused(page):
                    free.append(page)
        self._free.release(sorted(free))
        self._evict()

    def read(self, pages: Sequence[int], account: str | None = None) -> None:
        """Counts one more session that holds these pages in common, for this account. It holds them already.

        Raises:
            OutOfPages: fewer pages are available than would count in addition; nothing has changed.
        """
        num_more = sum(not self.readers[page] for page in pages)
        if num_more > self.num_available:
            raise too_few_pages(num_more, self.num_available)
        for page in pages:
            self.readers[page] += 1
        self._num_common += num_more
        self.charge(pages, account)
        self.version += 1
        self._evict()

    def stop_reading(self, pages: Sequence[int], account: str | None = None, *, num_promised: int = 0) -> None:
        """Counts one session less that holds these pages in common, and promises it `num_promised` pages instead.

        Raises:
            OutOfPages: fewer pages are available; nothing has changed.
        """
        num_less = sum(self.readers[page] == 1 for page in pages)
        if num_promised - num_less > self.num_available:
            raise too_few_pages(num_promised - num_less, self.num_available)
        for page in pages:
            self.readers[page] -= 1
        self._num_common -= num_less
        self._num_promised += num_promised
        self.charge(pages, account, -1)
        self.version += 1
        self._evict()

    def charge(self, pages: Sequence[int], account: str | None, num_readers: int = 1) -> None:
        """Counts one more session, or one less, that holds these pages in common and names this account."""
        if account is None:
            return
        changed = 1 if num_readers > 0 else 0
        for page in pages:
            self.charged_readers[page] += num_readers
            if self.charged_readers[page] == changed:
                self.num_charged[account] += num_readers
        if not self.num_charged[account]:
            del self.num_charged[account]

    def may_write(self, page: int) -> bool:
        """The page's only holder may write to it. Then the prefix cache forgets the page."""
        if self._num_holders[page] > 1:
            return False
        self._free.release(self._prefixes.forget(page))
        return True

    def add_prefix(self, key: PrefixKey, page: int, before: PrefixKey | None) -> None:
        """Adds a whole page that is held to the prefix cache. Its contents must not change while it is there.

        Args:
            before: the key without whose page this one is of no use (`PrefixKeys`); if it is not there, nothing is
                added.
        """
        if self.host is not None:
            self.host.overwritten(page)
        replaced = self._prefixes.add(key, page, before)
        if replaced is not None:
            self._free.release([replaced])

    def find_prefix(self, key: PrefixKey) -> int | None:
        """The page with this key, if there is one. The caller must share it before the pool changes, to keep it."""
        return self._prefixes.find(key)

    def has_prefix(self, key: PrefixKey) -> bool:
        """The page with this key is in the prefix cache, or waits in the memory of the machine."""
        return self._prefixes.find(key) is not None or (self.host is not None and key in self.host)

    def renew_prefix(self, key: PrefixKey) -> int | None:
        """Like `find_prefix`. If no session holds the page, it and those that it needs will be evicted last."""
        page = self._prefixes.find(key)
        if page is not None and not self._num_holders[page]:
            self._prefixes.renew(page)
        return page

    def _evict(self) -> None:
        while self.num_cached > self.num_available:
            key, pages = self._prefixes.evict()
            if self.host is not None:
                self.host.evicted(key, pages[0])
            self._free.release(pages)
