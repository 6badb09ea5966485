import itertools
import random
from contextlib import suppress

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from corolla.chassis.errors import MalformedMessage
from corolla.v1 import blocks_pb2 as pb
from corolla.v1 import common_pb2
from corolla.wire.frames import FrameParser, encode
from tests.frame_bytes import decode, join

numbers = st.integers(0, 2**32 - 1)
ids = st.binary(max_size=16)
spans = st.builds(common_pb2.BlockSpan, start=numbers, end=numbers)
hops = st.builds(common_pb2.Hop, server_id=st.text(max_size=8), address=st.text(max_size=8), span=spans)
rows = st.builds(
    pb.StepRow, session_id=ids, epoch=numbers, position=numbers, num_tokens=numbers, num_result_tokens=numbers
)
tensor_types = st.sampled_from(pb.TensorType.values())
controls: st.SearchStrategy[Message] = st.one_of(
    st.builds(pb.Hello, client_id=ids, fingerprint=st.text(max_size=8)),
    st.builds(pb.Welcome, server_id=st.text(max_size=8), span=spans, dtype=tensor_types, max_tokens_per_frame=numbers),
    st.builds(pb.Open, request_id=numbers, session_id=ids, tenant=st.text(max_size=8), resume=st.booleans()),
    st.builds(pb.Opened, request_id=numbers, session_id=ids, epoch=numbers, num_cached_tokens=numbers),
    st.builds(
        pb.Step, step_id=numbers, client_id=ids, rows=st.lists(rows, max_size=3), dtype=tensor_types, blocks=spans,
        route=st.lists(hops, max_size=2),
    ),
    st.builds(pb.Result, step_id=numbers, rows=st.lists(rows, max_size=3), dtype=tensor_types, hidden_size=numbers),
    st.builds(pb.Close, session_id=ids, epoch=numbers),
    st.builds(pb.Truncate, session_id=ids, epoch=numbers, position=numbers, idle=st.booleans()),
    st.builds(pb.Fault, step_id=numbers, reason=st.text(max_size=8), metadata=st.dictionaries(st.text(), st.text())),
)  # fmt: skip
frames = st.lists(st.tuples(controls, st.binary(max_size=64)), max_size=5)


@given(frames.filter(bool), st.data())
def test_of_a_truncated_message_the_complete_frames_are_read(
    given_frames: list[tuple[Message, bytes]], data: st.DataObject
) -> None:
    message = join(encode(control, payload) for control, payload in given_frames)
    length = data.draw(st.integers(0, len(message) - 1))
    ends = [len(join(encode(*each) for each in given_frames[:count])) for count in range(len(given_frames) + 1)]
    read = [(frame.control, bytes(frame.payload)) for frame in decode(message[:length])]
    assert read == given_frames[: sum(end <= length for end in ends[1:])]


@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_nothing_else(garbage: bytes) -> None:
    with suppress(MalformedMessage):
        list(decode(garbage))


@given(controls, st.binary(max_size=8), st.integers(0, 400), st.binary(min_size=1, max_size=4))
def test_damage_is_malformed_or_another_frame_but_never_another_failure(
    control: Message, payload: bytes, place: int, damage: bytes
) -> None:
    message = bytearray(join([encode(control, payload)]))
    place %= len(message)
    message[place : place + len(damage)] = damage
    with suppress(MalformedMessage):
        list(decode(bytes(message)))


@pytest.mark.parametrize(
    "message",
    [
        b"\xc0\x01\x63\x00" + bytes(8),
        b"\xc0\x02\x07\x00" + bytes(8),
        b"\xc0\x01\x07\x00\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xc0\x01\x07\x00\x02\x00\x00\x00\x00\x00\x00\x00\xff\xff",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["unknown kind", "another version", "lengths beyond the end", "bad control", "http"],
)
def test_an_invalid_frame_is_refused(message: bytes) -> None:
    with pytest.raises(MalformedMessage):
        list(decode(message))


def test_a_large_payload_is_a_view_into_the_memory_where_it_was_received() -> None:
    message = join([encode(pb.Close(epoch=1), bytes(8 << 20))])
    parser, received, num_rooms = FrameParser(1 << 26), 0, 0
    while received < len(message):
        room = parser.room()
        # What has come so far decides how much memory a header may ask for.
        assert len(room) <= max(1 << 16, 32 * received)
        num_bytes = min(len(room), len(message) - received)
        room[:num_bytes] = message[received : received + num_bytes]
        received += num_bytes
        found = list(parser.filled(num_bytes))
        num_rooms += 1
    (frame,) = found
    assert isinstance(frame.payload, memoryview)
    assert frame.payload.readonly
    assert frame.payload.obj is room.obj
    assert bytes(frame.payload) == bytes(8 << 20)
    assert num_rooms == 3


@pytest.mark.parametrize("sizes", [(1 << 16, 70_000, 3, 1 << 21, 0, 1 << 16), (65_519, 65_520, 65_521, 65_522)])
@pytest.mark.parametrize("most", [1_000, 1 << 16, 1 << 30])
def test_large_and_small_frames_follow_each_other(sizes: tuple[int, ...], most: int) -> None:
    sent = [(pb.Close(epoch=number), random.Random(number).randbytes(size)) for number, size in enumerate(sizes)]
    message, parser = join(encode(*each) for each in sent), FrameParser(1 << 26)
    cuts = [*range(0, len(message), most), len(message)]
    found = [
        (frame.control, bytes(frame.payload))
        for start, end in itertools.pairwise(cuts)
        for frame in parser.feed(message[start:end])
    ]
    assert found == sent


def test_header_and_layout_are_those_of_the_protocol() -> None:
    header, control, payload = encode(pb.Close(epoch=3), b"xyz")
    assert bytes(header) == b"\xc0\x01\x07\x00\x02\x00\x00\x00\x03\x00\x00\x00"
    assert (control, payload) == (b"\x10\x03", b"xyz")


@given(frames, st.data())
def test_frames_are_found_however_their_bytes_are_cut(
    given_frames: list[tuple[Message, bytes]], data: st.DataObject
) -> None:
    message = join(encode(control, payload) for control, payload in given_frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(message)), max_size=8)))
    parser = FrameParser(1 << 20)
    read = [
        (frame.control, bytes(frame.payload))
        for start, end in itertools.pairwise([0, *cuts, len(message)])
        for frame in parser.feed(message[start:end])
    ]
    assert read == given_frames


def test_a_frame_that_announces_to_be_too_large_is_refused_before_it_comes() -> None:
    message = join([encode(pb.Step(), bytes(1000))])
    assert [len(frame.payload) for frame in FrameParser(len(message)).feed(message)] == [1000]
    parser = FrameParser(len(message) - 1)
    assert list(parser.feed(message[:11])) == []
    with pytest.raises(MalformedMessage, match="larger than"):
        list(parser.feed(message[11:12]))
