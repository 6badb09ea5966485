"""Fields of messages, counted before they are parsed."""

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from corolla.chassis.errors import MalformedMessage
from corolla.chassis.message_fields import check_fields
from corolla.v1 import generation_pb2 as pb

DESCRIPTOR: Descriptor = pb.ChatRequest.DESCRIPTOR
UNKNOWN_NUMBERS = b"\x80\x80\x80\x80\x01"
"""The first bytes of a field with a number of several bytes."""


def chat(number: int) -> pb.ChatRequest:
    request = pb.ChatRequest(messages=[pb.ChatMessage(content_parts=[""] * number)])
    request.sampling.temperature = 1
    request.sampling.logit_bias[3] = 1
    request.template_arguments.update({"a": [1.0, {"b": True}]})
    request.received.ids.extend(range(1000, 3000))
    return request


def num_fields(message: Message) -> int:
    """The fields as they are written: a packed list is one."""
    found = 0
    for field, value in message.ListFields():
        if field.message_type is None:
            found += len(value) if field.is_repeated and not field.is_packed else 1
        elif field.message_type.GetOptions().map_entry:
            for entry in value:
                inner = value[entry]
                found += 3 + (num_fields(inner) if isinstance(inner, Message) else 0)
        else:
            found += sum(1 + num_fields(each) for each in (value if field.is_repeated else [value]))
    return found


def test_the_fields_of_inner_messages_count() -> None:
    message = chat(10)
    exact = num_fields(message)
    data = message.SerializeToString()
    check_fields(data, DESCRIPTOR, exact)
    with pytest.raises(MalformedMessage):
        check_fields(data, DESCRIPTOR, exact - 1)


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a" * 64, b"\x0a\xff\xff\xff\x7f" * 9, UNKNOWN_NUMBERS * 16])
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    check_fields(data, DESCRIPTOR, 31)


def test_a_request_of_very_many_fields_is_refused_without_counting_them_all() -> None:
    with pytest.raises(MalformedMessage) as refusal:
        check_fields(b"\x12\x00" * (2 << 20), DESCRIPTOR, 1000)
    assert "more than 1000 fields" in refusal.value.message
