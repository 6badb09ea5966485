"""By which digests client services and hops name the pages of a text. Pure."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

from corolla.v1 import blocks_pb2 as pb

HASH_BYTES: Final = 16


def page_hashes(token_ids: Sequence[int], page_tokens: int, salt: bytes = b"") -> bytes:
    """One digest for each whole page of a text, end to end: of the page's token ids and the digest before.

    So the same digest means the same text from its beginning. BLAKE2b with 128 bits: two texts that meet by chance are
    not to be expected, and only one's own tenant could look for them. With a salt, only who knows it.
    """
    hashes = bytearray()
    before = hashlib.blake2b(salt, digest_size=HASH_BYTES).digest() if salt else b""
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = struct.pack(f"<{page_tokens}I", *token_ids[start : start + page_tokens])
        before = hashlib.blake2b(before + page, digest_size=HASH_BYTES).digest()
        hashes += before
    return bytes(hashes)


class TextDigests:
    """One text, as hops with pages of one size or another know it; most have the same size.

    Args:
        token_ids: of the text.
        salt: texts with another one are others.
    """

    def __init__(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._by_page_tokens: dict[int, pb.ExpectedText] = {}

    def of(self, page_tokens: int) -> pb.ExpectedText:
        """For pages of `page_tokens`, at least 1."""
        text = self._by_page_tokens.get(page_tokens)
        if text is None:
            hashes = page_hashes(self._token_ids, page_tokens, self._salt)
            text = pb.ExpectedText(num_tokens=len(self._token_ids), page_hashes=hashes)
            self._by_page_tokens[page_tokens] = text
        return text
