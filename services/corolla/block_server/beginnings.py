"""The newest beginnings of texts that client services named and this server holds, for its heartbeats. Pure."""

import itertools
from collections.abc import Callable, Iterator, Sequence
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
    """Maps the digests of beginnings to their numbers and last pages. A new beginning gets the next number.

    Args:
        holds: whether a text can still continue from the end of a page.
    """

    holds: Callable[[PrefixKey], bool]
    # In order of use, least recently used first.
    _noted: dict[int, tuple[int, PrefixKey]] = field(init=False, default_factory=dict)
    _numbers: Iterator[int] = field(init=False, default_factory=itertools.count)

    def note(self, digest: int, last_page: PrefixKey) -> None:
        """Notes a beginning. A known one keeps its number, and the one that was noted longest ago is dropped first.

        For example, a system prompt that every second text begins with stays, however many texts have ended since.
        """
        known = self._noted.pop(digest, None)
        self._noted[digest] = (next(self._numbers) if known is None else known[0], last_page)
        if len(self._noted) > MOST_ANNOUNCED:
            del self._noted[next(iter(self._noted))]

    def newest_first(self) -> bytes:
        """Returns the digests of those from which texts can continue, and forgets the others."""
        self._noted = {digest: noted for digest, noted in self._noted.items() if self.holds(noted[1])}
        return pack(sorted(self._noted, key=lambda digest: -self._noted[digest][0]))


def named_in(holds: pb.Holds, sender: Workload | None) -> Sequence[pb.Beginning]:
    """Returns the beginnings that heartbeats are to announce. A library, which is of one tenant, has no say in that.

    Raises:
        MalformedMessage: they are too many.
    """
    if len(holds.beginnings) > MOST_NAMED:
        raise MalformedMessage("beginnings", f"must be at most {MOST_NAMED}")
    return holds.beginnings if sender is None or sender.role is Role.CLIENT else ()
