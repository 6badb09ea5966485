"""Encodes frames of the data plane without copying their tensors, and finds frames in a stream of bytes.

`protos/corolla/v1/blocks.proto` describes the layout.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError, Message

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb

Buffer = bytes | bytearray | memoryview

MAX_PROMPT_BYTES: Final = 32 << 20
"""The most bytes of trained prompts that one session may bring to one hop."""
MAX_TENANT_CHARS: Final = 256
"""The most characters of a tenant's name; routers have the same limit."""

_HEADER: Final = struct.Struct("<HBxII")
_MAGIC: Final = 0x01C0
_ROOM_BYTES: Final = 64 << 10
_GROWTH: Final = 32

CONTROL_CLASSES: Final[dict[int, type[Message]]] = {
    number: getattr(pb, name.removeprefix("FRAME_KIND_").title().replace("_", ""))
    for name, number in pb.FrameKind.items()
    if number != pb.FRAME_KIND_UNSPECIFIED
}
"""The message class of each kind of frame. A kind is named after its message: FRAME_KIND_GO_AWAY is GoAway."""
_KINDS: Final = {cls.DESCRIPTOR.full_name: kind for kind, cls in CONTROL_CLASSES.items()}


def is_tenant_name(name: str) -> bool:
    """Block servers and routers accept the name of a tenant."""
    return 0 < len(name) <= MAX_TENANT_CHARS and name.isprintable()


class Frame(NamedTuple):
    """One decoded frame. The payload is a view into the received bytes."""

    control: Message
    payload: Buffer


def encode(control: Message, payload: Buffer = b"") -> tuple[Buffer, ...]:
    """Returns the parts of one frame, in the order in which to write them, without empty parts or copied payload."""
    control_bytes = control.SerializeToString()
    header = _HEADER.pack(_MAGIC, _KINDS[control.DESCRIPTOR.full_name], len(control_bytes), len(payload))
    # Empty parts are left out: in Python 3.12 and later, asyncio's `writelines` never drops an empty last part, and the
    # event loop spins.
    return tuple(part for part in (header, control_bytes, payload) if len(part))


class FrameParser:
    """Finds the frames in a stream of bytes, however it is cut into pieces.

    Bytes are written into `room`, and `filled` finds the frames. Those of a large frame are received where they stay.

    Args:
        max_frame_bytes: the most bytes of a frame with its header. A frame whose header says more is refused at once.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._num_needed = _HEADER.size
        # The first bytes of an incomplete frame; of a large frame the first `_num_bytes` of a buffer.
        self._rest = b""
        self._large: bytearray | None = None
        self._num_bytes = 0
        self._small = memoryview(bytearray(_ROOM_BYTES))

    def room(self) -> memoryview:
        """The memory for the next bytes; it is valid until the next call of `filled`, and never empty."""
        if self._large is None:
            return self._small
        if self._num_bytes == len(self._large):
            # The buffer grows with what has come, since a header alone must not make a process take much memory.
            grown = bytearray(min(self._num_needed, _GROWTH * self._num_bytes))
            grown[: self._num_bytes] = self._large
            self._large = grown
        return memoryview(self._large)[self._num_bytes :]

    def filled(self, num_bytes: int) -> Iterator[Frame]:
        """Yields the frames that the next bytes in `room` complete, in order. Consume all of them before the next call.

        Raises:
            MalformedMessage: a frame is too large, of an unknown kind or not of this protocol.
        """
        if self._large is not None:
            self._num_bytes += num_bytes
            if self._num_bytes < self._num_needed:
                return
            view, self._large = memoryview(self._large).toreadonly(), None
        else:
            self._rest += bytes(self._small[:num_bytes])
            if len(self._rest) < self._num_needed:
                return
            view = memoryview(self._rest)
        offset = 0
        while True:
            frame, end = _read_frame(view, offset)
            if end - offset > self._max_frame_bytes:
                raise MalformedMessage("frame", f"larger than the {self._max_frame_bytes} bytes that a stream takes")
            if frame is None:
                break
            yield frame
            offset = end
        # The bytes of the incomplete frame are copied, so that they do not keep the whole buffer alive.
        self._rest, self._num_needed = bytes(view[offset:]), end - offset
        if self._num_needed > _ROOM_BYTES:
            self._large, self._num_bytes = bytearray(max(len(self._rest), _ROOM_BYTES)), len(self._rest)
            self._large[: self._num_bytes], self._rest = self._rest, b""

    def feed(self, data: Buffer) -> Iterator[Frame]:
        """Yields the frames that `data` completes, in order; see `filled`."""
        view = memoryview(data)
        while len(view):
            room = self.room()
            num_bytes = min(len(room), len(view))
            room[:num_bytes], view = view[:num_bytes], view[num_bytes:]
            yield from self.filled(num_bytes)


def _read_frame(view: memoryview, offset: int) -> tuple[Frame | None, int]:
    """Returns the frame at `offset`, None if it is incomplete, and where it ends, or its header if that is incomplete.

    Raises:
        MalformedMessage: the frame is of an unknown kind, or does not belong to this protocol.
    """
    payload_start = offset + _HEADER.size
    if payload_start > len(view):
        return None, payload_start
    magic, kind, control_length, payload_length = _HEADER.unpack_from(view, offset)
    cls = CONTROL_CLASSES.get(kind)
    if magic != _MAGIC or cls is None:
        raise MalformedMessage("frame", "not a frame of this protocol version")
    control_start, payload_start = payload_start, payload_start + control_length
    end = payload_start + payload_length
    if end > len(view):
        return None, end
    try:
        control = cls.FromString(bytes(view[control_start:payload_start]))
    except DecodeError:
        raise MalformedMessage("frame", f"the control part cannot be read as {cls.DESCRIPTOR.name}") from None
    return Frame(control, view[payload_start:end]), end
