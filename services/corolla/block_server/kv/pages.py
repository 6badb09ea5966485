"""Exact accounting of the server's KV pages. Pure: it counts, the store allocates."""

from corolla.chassis.errors import OutOfPages


class PagePool:
    """`num_pages` pages of `page_tokens` tokens; a page spans all blocks of the server.

    Invariant: `0 <= num_free <= num_pages`, and what was taken is given back exactly once by its owner.
    """

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ValueError("a pool has at least one page of at least one token")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.num_free = num_pages

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` tokens of one session."""
        return -(-num_tokens // self.page_tokens)

    def take(self, num_pages: int) -> None:
        """Raises OutOfPages, and takes nothing, when fewer are free."""
        if num_pages > self.num_free:
            raise OutOfPages(
                "a block server has too few free KV pages for this request",
                metadata={"pages_needed": str(num_pages), "pages_free": str(self.num_free)},
            )
        self.num_free -= num_pages

    def give(self, num_pages: int) -> None:
        if self.num_free + num_pages > self.num_pages:
            raise ValueError("more pages came back than were taken")
        self.num_free += num_pages
