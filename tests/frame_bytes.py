"""Frames of the data plane as bytes, for tests that write no stream."""

from collections.abc import Iterable

from corolla.wire.frames import Buffer


def join(frames: Iterable[tuple[Buffer, ...]]) -> bytes:
    """The bytes of encoded frames, one behind the other."""
    return b"".join(part for frame in frames for part in frame)
