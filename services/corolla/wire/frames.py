"""Frames of the data plane: encoded without copying the tensor, several to a message.

The layout stands in `protos/corolla/v1/blocks.proto`.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError, Message

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb

Buffer = bytes | bytearray | memoryview

EXCHANGE: Final = "/corolla.v1.BlockService/Exchange"
"""The method whose messages are frames; called by its path, because the generated stub would serialise protobufs."""

_HEADER: Final = struct.Struct("<HBxII")
_MAGIC: Final = 0x01C0

_CONTROL_CLASSES: Final[dict[int, type[Message]]] = {
    pb.FRAME_KIND_HELLO: pb.Hello,
    pb.FRAME_KIND_WELCOME: pb.Welcome,
    pb.FRAME_KIND_OPEN: pb.Open,
    pb.FRAME_KIND_OPENED: pb.Opened,
    pb.FRAME_KIND_STEP: pb.Step,
    pb.FRAME_KIND_RESULT: pb.Result,
    pb.FRAME_KIND_CLOSE: pb.Close,
    pb.FRAME_KIND_TRUNCATE: pb.Truncate,
    pb.FRAME_KIND_FAULT: pb.Fault,
    pb.FRAME_KIND_RESEND: pb.Resend,
    pb.FRAME_KIND_HANDOVER: pb.Handover,
    pb.FRAME_KIND_HANDOVER_TOKENS: pb.HandoverTokens,
    pb.FRAME_KIND_HANDOVER_ANSWER: pb.HandoverAnswer,
    pb.FRAME_KIND_MOVED: pb.Moved,
    pb.FRAME_KIND_HOLDS: pb.Holds,
}
_KINDS: Final = {cls.DESCRIPTOR.full_name: kind for kind, cls in _CONTROL_CLASSES.items()}


class Frame(NamedTuple):
    """One decoded frame. The payload is a view into the received message."""

    control: Message
    payload: Buffer


def encode(control: Message, payload: Buffer = b"") -> tuple[Buffer, ...]:
    """The parts of one frame, to be joined with those of others by `join`. The payload is not copied here."""
    control_bytes = control.SerializeToString()
    header = _HEADER.pack(_MAGIC, _KINDS[control.DESCRIPTOR.full_name], len(control_bytes), len(payload))
    return (header, control_bytes, payload)


def join(frames: Iterable[tuple[Buffer, ...]]) -> bytes:
    """One message out of encoded frames: the only copy on the way out."""
    return b"".join(part for frame in frames for part in frame)


def decode(message: bytes) -> Iterator[Frame]:
    """The frames of a message, in order.

    Raises:
        MalformedMessage: the message is cut short, of an unknown kind or not of this protocol.
    """
    view = memoryview(message)
    offset = 0
    while offset < len(view):
        if len(view) - offset < _HEADER.size:
            raise MalformedMessage("frame", "the header is cut short")
        magic, kind, control_length, payload_length = _HEADER.unpack_from(view, offset)
        cls = _CONTROL_CLASSES.get(kind)
        if magic != _MAGIC or cls is None:
            raise MalformedMessage("frame", "not a frame of this protocol version")
        control_start = offset + _HEADER.size
        payload_start = control_start + control_length
        offset = payload_start + payload_length
        if offset > len(view):
            raise MalformedMessage("frame", "the frame is cut short")
        try:
            control = cls.FromString(bytes(view[control_start:payload_start]))
        except DecodeError:
            raise MalformedMessage("frame", f"the control part is no {cls.DESCRIPTOR.name}") from None
        yield Frame(control, view[payload_start:offset])
