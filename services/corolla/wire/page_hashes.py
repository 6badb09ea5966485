"""Computes the digests by which client services and hops name the pages of a text. Pure.

The digests of a text form a hash chain. The automatic prefix caching of vLLM names its pages in the same way.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from corolla.v1 import blocks_pb2 as pb

HASH_BYTES: Final = 16


def page_hashes(token_ids: Sequence[int], page_tokens: int, salt: bytes = b"", known: bytes = b"") -> bytes:
    """Returns the digests of a text's whole pages, concatenated. Each covers its page's ids and the digest before it.

    So equal digests mean that the texts are equal from their beginning. With 128 bits of BLAKE2b, collisions by chance
    are not to be expected, and only callers of the same tenant could search for one; with a salt, only those that know
    it.

    Args:
        known: the digests of the first pages, which are not computed again.
    """
    hashes = bytearray(known)
    before = known[-HASH_BYTES:] if known or not salt else hashlib.blake2b(salt, digest_size=HASH_BYTES).digest()
    first = len(known) // HASH_BYTES * page_tokens
    for start in range(first, len(token_ids) - page_tokens + 1, page_tokens):
        page = struct.pack(f"<{page_tokens}I", *token_ids[start : start + page_tokens])
        before = hashlib.blake2b(before + page, digest_size=HASH_BYTES).digest()
        hashes += before
    return bytes(hashes)


class TextDigests:
    """A text that may go on, and the digests of its pages. Each digest is computed once.

    Hops differ in the size of their pages, and in the salts by which equal servers recognise what they computed.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._token_ids = token_ids
        self._hashes: dict[tuple[int, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._token_ids)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes the text as it is now. If its beginning is the same, the digests of that remain."""
        num_known = min(len(token_ids), len(self._token_ids))
        if list(token_ids[:num_known]) == list(self._token_ids[:num_known]):
            self._hashes = {
                (page_tokens, salt): hashes[: num_known // page_tokens * HASH_BYTES]
                for (page_tokens, salt), hashes in self._hashes.items()
            }
        else:
            self._hashes.clear()
        self._token_ids = token_ids

    def followed_by(self, token_ids: Sequence[int]) -> "TextDigests":
        """Returns the text as it is now, and leaves this one as it is; see `follow`."""
        text = TextDigests(self._token_ids)
        text._hashes = dict(self._hashes)
        text.follow(token_ids)
        return text

    def until(self, num_tokens: int) -> "TextDigests":
        """Returns the beginning of the text."""
        return TextDigests(self._token_ids[:num_tokens])

    def of(self, page_tokens: int, salt: bytes = b"", num_tokens: int | None = None) -> pb.ExpectedText:
        """Returns the digests for pages of `page_tokens` tokens, at least 1.

        Args:
            salt: the same text has other digests with another salt.
            num_tokens: of the beginning that is to be named; None: of all.
        """
        if num_tokens is None:
            num_tokens = len(self._token_ids)
        num_bytes = num_tokens // page_tokens * HASH_BYTES
        hashes = self._hashes.get((page_tokens, salt), b"")
        if len(hashes) < num_bytes:
            hashes = self._hashes[page_tokens, salt] = page_hashes(self._token_ids, page_tokens, salt, hashes)
        return pb.ExpectedText(num_tokens=num_tokens, page_hashes=hashes[:num_bytes])
