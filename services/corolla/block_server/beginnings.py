"""The newest beginnings of texts that client services named and this server holds, for its heartbeats. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from corolla.cache.prefixes import PrefixKey
from corolla.chassis.errors import MalformedMessage
from corolla.trust.workload import Role, Workload
from corolla.v1 import blocks_pb2 as pb
from corolla.wire.beginnings import pack

MOST_ANNOUNCED: Final = 64
"""The most beginnings in one heartbeat. Client services remember more, so they miss some only if so many come anew
between two heartbeats, or if they start later."""
MOST_NAMED: Final = 4
"""The most beginnings that a client service names of one text."""


@dataclass(eq=False, repr=False)
class AnnouncedBeginnings:
    """Maps the digests of beginnings to their last pages, the newest last.

    Args:
        holds: whether the server still has a page.
    """

    holds: Callable[[PrefixKey], bool]
    _last_pages: dict[int, PrefixKey] = field(init=False, default_factory=dict)

    def note(self, digest: int, last_page: PrefixKey) -> None:
        """Notes a beginning. One that is noted again keeps its place, so that what is new comes first."""
        self._last_pages.setdefault(digest, last_page)
        if len(self._last_pages) > MOST_ANNOUNCED:
            del self._last_pages[next(iter(self._last_pages))]

    def newest_first(self) -> bytes:
        """Returns the digests of those whose pages have not been evicted, and forgets the others."""
        self._last_pages = {digest: page for digest, page in self._last_pages.items() if self.holds(page)}
        return pack(reversed(self._last_pages))


def named_in(holds: pb.Holds, sender: Workload | None) -> Sequence[pb.Beginning]:
    """Returns the beginnings that heartbeats are to announce. A library, which is of one tenant, has no say in that.

    Raises:
        MalformedMessage: they are too many.
    """
    if len(holds.beginnings) > MOST_NAMED:
        raise MalformedMessage("beginnings", f"must be at most {MOST_NAMED}")
    return holds.beginnings if sender is None or sender.role is Role.CLIENT else ()
