"""Computes the digests by which client services and hops name the pages of a text. Pure.

The digests of a text form a hash chain. The automatic prefix caching of vLLM names its pages in the same way.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from corolla.v1 import blocks_pb2 as pb

HASH_BYTES: Final = 16


def page_hashes(token_ids: Sequence[int], page_tokens: int, salt: bytes = b"") -> bytes:
    """Returns the digests of a text's whole pages, concatenated. Each covers its page's ids and the digest before it.

    So equal digests mean that the texts are equal from their beginning. With 128 bits of BLAKE2b, collisions by chance
    are not to be expected, and only callers of the same tenant could search for one; with a salt, only those that know
    it.
    """
    hashes = bytearray()
    before = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if salt else b""
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = struct.pack(f"<{page_tokens}I", *token_ids[start : start + page_tokens])
        before = hashlib.blake2b(before + page, digest_size=HASH_BYTES).digest()
        hashes += before
    return bytes(hashes)


class TextDigests:
    """The digests of one text, for hops whose pages differ in size. It computes them once for each size.

    Args:
        salt: the same text has other digests with another salt.
    """

    def __init__(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_page_tokens: dict[int, pb.ExpectedText] = {}

    def of(self, page_tokens: int) -> pb.ExpectedText:
        """Returns the text's digests for pages of `page_tokens` tokens, at least 1."""
        text = self._by_page_tokens.get(page_tokens)
        if text is None:
            hashes = page_hashes(self._token_ids, page_tokens, self._salt)
            text = pb.ExpectedText(num_tokens=len(self._token_ids), page_hashes=hashes)
            self._by_page_tokens[page_tokens] = text
        return text
