"""What a text is called in the prefix caches of the hops. Pure."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 16


def page_hashes(token_ids: Sequence[int], page_tokens: int) -> bytes:
    """One digest for each whole page of a text, end to end: of the page's token ids and the digest before.

    So the same digest means the same text from its beginning. BLAKE2b with 128 bits: two texts that meet by chance are
    not to be expected, and only one's own tenant could look for them.
    """
    hashes = bytearray()
    before = b""
    for start in range(0, len(token_ids) - page_tokens + 1, page_tokens):
        page = struct.pack(f"<{page_tokens}I", *token_ids[start : start + page_tokens])
        before = hashlib.blake2b(before + page, digest_size=HASH_BYTES).digest()
        hashes += before
    return bytes(hashes)
