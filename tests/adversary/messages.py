"""Any message of a protocol, and the bytes of one that something has damaged."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Known = Mapping[type, Sequence[Any]]
"""Values that mean something to the services at hand, by their Python types: names, ids, numbers."""

_MOST_DEEP: Final = 4
_EDGES: Final = (0, 1, 2, 3, 5, 16, 2**7, 2**16, 2**31 - 1)
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def messages(cls: type[Message], known: Known) -> st.SearchStrategy[Message]:
    """Messages with any fields set, to values that are known, at the edge of what they may be, or anything."""
    descriptor: Any = cls.DESCRIPTOR
    return _messages(descriptor, known, 0)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """The bytes of a whole message or frame, some of which are changed, lost, repeated or new."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        new = draw(st.binary(max_size=8))
        data[start:end] = draw(st.sampled_from([b"", new, bytes(data[start:end] * 2)]))
    return bytes(data)


def _messages(descriptor: Descriptor, known: Known, depth: int) -> st.SearchStrategy[Message]:
    cls = message_factory.GetMessageClass(descriptor)
    fields = {field.name: _field(field, known, depth) for field in descriptor.fields if depth < _MOST_DEEP}
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: cls(**values))


def _field(field: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(_value(entry["key"], known, depth), _value(entry["value"], known, depth), max_size=3)
    value = _value(field, known, depth)
    return st.lists(value, max_size=4) if field.is_repeated else value


def _value(field: FieldDescriptor, known: Known, depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return _messages(field.message_type, known, depth + 1)
    if field.enum_type is not None:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99])
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return st.sampled_from([*known.get(int, ()), *_EDGES, low, high]) | st.integers(low, high)
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return st.sampled_from([*known.get(str, ()), ""]) | st.text(max_size=24)
        case FieldDescriptor.TYPE_BYTES:
            return st.sampled_from([*known.get(bytes, ()), b""]) | st.binary(max_size=24)
        case FieldDescriptor.TYPE_FLOAT:
            return st.sampled_from([0.0, 0.5, 1.0]) | st.floats(width=32)
        case _:
            return st.sampled_from([0.0, 0.5, 1.0]) | st.floats()
