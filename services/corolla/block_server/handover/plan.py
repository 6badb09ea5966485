"""Which server takes a session over, and which part is sent next. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from corolla.planning.candidates import has_room
from corolla.v1 import router_pb2
from corolla.wire.span import Span

MAX_REPEATS: Final = 8
"""After so many answers in a row without progress a handover is given up."""


def peers_for(
    servers: Iterable[router_pb2.PlacedServer],
    fingerprint: str,
    blocks: Span,
    num_tokens: int,
    excluded: Collection[str],
    *,
    is_guaranteed: bool = False,
) -> list[router_pb2.PlacedServer]:
    """Servers that could take a session of `blocks` over, those with most free pages first.

    Args:
        num_tokens: for which they need pages.
        excluded: server ids.
        is_guaranteed: the session's tenant has pages that no server says are free; those without room come last then.
    """
    usable = [
        each
        for each in servers
        if each.state == router_pb2.SERVER_STATE_READY
        and not each.suspected
        and each.server.fingerprint == fingerprint
        and each.server.server_id not in excluded
        and each.span.start <= blocks.start
        and blocks.end <= each.span.end
        and (is_guaranteed or has_room(each.load, num_tokens))
    ]

    def rank(each: router_pb2.PlacedServer) -> tuple[bool, int, str]:
        return not has_room(each.load, num_tokens), -each.load.num_free_pages, each.server.server_id

    return sorted(usable, key=rank)


@dataclass(slots=True)
class Progress:
    """How far the receiver of one session is.

    Attributes:
        num_received: tokens that it has.
    """

    num_received: int = 0
    _num_repeats: int = 0

    def next_part(self, num_held: int, num_unchanged: int, max_tokens: int) -> tuple[int, int, bool]:
        """What to send now: first token, number of tokens, and whether nothing remains after it.

        Args:
            num_held: tokens of the session here; it may have grown, or gone back, since the last part.
            num_unchanged: its first tokens that are those that were sent.
            max_tokens: of a part.
        """
        start = min(self.num_received, num_unchanged, num_held)
        num_tokens = min(max_tokens, num_held - start)
        return start, num_tokens, start + num_tokens == num_held

    def answered(self, num_held: int, *, taken: bool) -> bool:
        """Notes what the receiver holds now. False when it is time to give up."""
        self.num_received = num_held
        self._num_repeats = 0 if taken else self._num_repeats + 1
        return self._num_repeats < MAX_REPEATS
