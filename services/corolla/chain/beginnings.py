"""Remembers which servers hold which beginnings of texts, for the next text that begins alike. Pure.

Callers of stateless interfaces send a whole conversation again with each turn. A server that computed the turn before
still holds its pages, so a plan that leads there spares the prompt. This module keeps digests of the same kind as the
names of pages (`wire/page_hashes`) and ids of servers, and nothing of the text.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from corolla.wire.page_hashes import HASH_BYTES, page_hashes

STRIDE_TOKENS: Final = 64
"""The tokens between two beginnings of one text that are remembered."""
MOST_BEGINNINGS: Final = 1 << 15
_MOST_SERVERS: Final = 32
"""The most servers that are remembered for one beginning; the newest texts with it count."""


class Beginnings:
    """Maps beginnings to the servers that were last known to hold them, and drops the beginnings of the oldest texts.

    Args:
        most: the greatest number of beginnings.
    """

    def __init__(self, most: int = MOST_BEGINNINGS) -> None:
        self._most = most
        self._servers: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def remember(self, token_ids: Sequence[int], salt: bytes, server_ids: Iterable[str]) -> None:
        """Notes that servers hold a text.

        Args:
            salt: texts with other salts never meet: it stands for the tenant and for what else pages depend on.
        """
        newest = tuple(server_ids)
        # The first beginnings of a text are dropped last.
        for digest in reversed(_digests(token_ids, salt)):
            before = self._servers.pop(digest, ())
            others = (each for each in before if each not in newest)
            self._servers[digest] = (*newest, *others)[:_MOST_SERVERS]
        while len(self._servers) > self._most:
            self._servers.popitem(last=False)

    def held(self, token_ids: Sequence[int], salt: bytes) -> Mapping[str, int]:
        """Returns how many of a text's first tokens servers may still hold, by server id."""
        held: dict[str, int] = {}
        digests = _digests(token_ids, salt)
        for count in range(len(digests), 0, -1):
            for server_id in self._servers.get(digests[count - 1], ()):
                held.setdefault(server_id, count * STRIDE_TOKENS)
            if len(held) >= _MOST_SERVERS:
                break
        return held


def _digests(token_ids: Sequence[int], salt: bytes) -> list[bytes]:
    """The digest of each beginning of a whole number of strides."""
    hashes = page_hashes(token_ids, STRIDE_TOKENS, salt)
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
