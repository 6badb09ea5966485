"""Remembers which servers hold which beginnings of texts, for the next text that begins alike. Pure.

Callers of stateless interfaces send a whole conversation again with each turn. A server that computed the turn before
still holds its pages, so a plan that leads there spares the prompt. This module keeps digests, begun with the salt of
the tenant, and ids of servers, and nothing of the text. It learns of the texts that this process sent, and of those
that servers announce, since the callers of other client services left them there.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from corolla.v1 import blocks_pb2 as pb
from corolla.wire.beginnings import DIGEST_BYTES, unpack
from corolla.wire.page_hashes import HASH_BYTES, TextDigests

STRIDE_TOKENS: Final = 64
"""The tokens between two beginnings of one text that are remembered."""
_MOST_OWN: Final = 1 << 15
_MOST_HEARD: Final = 1 << 16
"""A thousand servers announce no more than that together."""
_MOST_SERVERS: Final = 32
"""The most servers that are remembered for one beginning; those that came to hold it last count."""


class Beginnings:
    """Maps beginnings to the servers that were last known to hold them.

    What servers announce is kept apart from what this process sent: a router's first push announces much at once, and
    takes no place of the process's own texts.

    Args:
        most: the greatest number of beginnings of the process's own texts.
        most_heard: the greatest number of those that servers announce.
    """

    def __init__(self, most: int = _MOST_OWN, most_heard: int = _MOST_HEARD) -> None:
        self._own, self._heard = _Holders(most), _Holders(most_heard)

    def remember(self, text: TextDigests, salt: bytes, server_ids: Iterable[str]) -> None:
        """Notes that servers hold a text.

        Args:
            salt: texts with other salts never meet: it stands for the tenant and for what else pages depend on.
        """
        # The first beginnings of a text are dropped last.
        self._own.note(reversed(_digests(text, salt)), tuple(server_ids))

    def hear(self, server_id: str, announced: bytes) -> None:
        """Notes the beginnings that a server announces, the newest first."""
        self._heard.note(reversed(unpack(announced)), (server_id,))

    def held(self, text: TextDigests, salt: bytes) -> Mapping[str, int]:
        """Returns how many of a text's first tokens servers may still hold, by server id."""
        held: dict[str, int] = {}
        digests = _digests(text, salt)
        for count in range(len(digests), 0, -1):
            for holders in (self._own, self._heard):
                for server_id in holders.of(digests[count - 1]):
                    held.setdefault(server_id, count * STRIDE_TOKENS)
            if len(held) >= _MOST_SERVERS:
                break
        return held


class _Holders:
    """Maps beginnings to the servers that hold them, and drops the beginnings that were noted longest ago."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._servers: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def of(self, digest: int) -> tuple[str, ...]:
        return self._servers.get(digest, ())

    def note(self, digests: Iterable[int], newest: tuple[str, ...]) -> None:
        newest = newest[:_MOST_SERVERS]
        for digest in digests:
            before = self._servers.setdefault(digest, newest)
            if before is not newest:
                self._servers.move_to_end(digest)
                new = [each for each in newest if each not in before]
                self._servers[digest] = (*new, *before)[:_MOST_SERVERS] if new else before
        while len(self._servers) > self._most:
            self._servers.popitem(last=False)


def named_beginnings(text: TextDigests, salt: bytes, ends: Iterable[int]) -> Iterator[pb.Beginning]:
    """Yields the longest beginnings of a text that end at or before `ends`, for the servers that hold it."""
    digests = _digests(text, salt)
    for count in sorted({min(end, len(text)) // STRIDE_TOKENS for end in ends}):
        if count:
            yield pb.Beginning(num_tokens=count * STRIDE_TOKENS, digest=digests[count - 1])


def _digests(text: TextDigests, salt: bytes) -> Sequence[int]:
    """The digest of each beginning of a whole number of strides.

    It is the first part of a digest that names pages: it is a hint, and a server finds out what it holds.
    """
    return unpack(text.of(STRIDE_TOKENS, salt).page_hashes)[:: HASH_BYTES // DIGEST_BYTES]
