"""Frames of the data plane as bytes, for tests that have no stream."""

from collections.abc import Iterable, Iterator

from corolla.wire.frames import Buffer, Frame, FrameParser

_MAX_FRAME_BYTES = 1 << 26


def join(frames: Iterable[tuple[Buffer, ...]]) -> bytes:
    """The bytes of encoded frames, one behind the other."""
    return b"".join(part for frame in frames for part in frame)


def decode(data: bytes) -> Iterator[Frame]:
    """The whole frames in bytes, in order."""
    return FrameParser(_MAX_FRAME_BYTES).feed(data)
