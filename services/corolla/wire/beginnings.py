"""The form in which servers announce the digests of beginnings of texts. Pure."""

import struct
from collections.abc import Iterable
from typing import Final

DIGEST_BYTES: Final = 8


def pack(digests: Iterable[int]) -> bytes:
    """Returns digests as bytes."""
    return b"".join(digest.to_bytes(DIGEST_BYTES, "little") for digest in digests)


def unpack(announced: bytes) -> tuple[int, ...]:
    """Returns the digests in these bytes."""
    return struct.unpack(f"<{len(announced) // DIGEST_BYTES}Q", announced)


def added(before: bytes, now: bytes) -> bytes:
    """Returns the digests that a server announces anew; it puts what is new before the others."""
    end = now.find(before[:DIGEST_BYTES]) if before else len(now)
    if end >= 0 and end % DIGEST_BYTES == 0:
        return now[:end]
    # The newest one of before has been evicted.
    known = frozenset(unpack(before))
    return pack(digest for digest in unpack(now) if digest not in known)
