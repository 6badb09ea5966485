import asyncio

import pytest

from corolla.v1 import blocks_pb2 as pb
from corolla.wire import outbox as outbox_module
from corolla.wire.frames import decode
from corolla.wire.outbox import Outbox, OutboxFull


def epochs(message: bytes) -> list[int]:
    return [frame.control.epoch for frame in decode(message)]  # type: ignore[attr-defined]


async def test_ready_frames_travel_together_and_in_order() -> None:
    outbox = Outbox()
    messages = outbox.messages()
    for epoch in (1, 2, 3):
        outbox.put(pb.Close(epoch=epoch))
    assert epochs(await anext(messages)) == [1, 2, 3]
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(pb.Close(epoch=4))
    assert epochs(await waiting) == [4]


async def test_a_closed_outbox_gives_its_waiting_frames_and_ends() -> None:
    outbox = Outbox()
    outbox.put(pb.Close(epoch=1))
    outbox.close()
    outbox.put(pb.Close(epoch=2))
    assert [epochs(message) async for message in outbox.messages()] == [[1]]


async def test_a_reader_that_does_not_keep_up_is_noticed_and_one_that_does_is_not() -> None:
    outbox = Outbox(max_waiting_bytes=1000)
    messages = outbox.messages()
    for _ in range(10):
        outbox.put(pb.Close(epoch=1), bytes(800))
        assert len(await anext(messages)) > 800
    outbox.put(pb.Close(epoch=1), bytes(800))
    with pytest.raises(OutboxFull):
        outbox.put(pb.Close(epoch=2), bytes(800))


async def test_refused_frames_take_no_room_once_the_reader_keeps_up_again() -> None:
    outbox = Outbox(max_waiting_bytes=1000)
    messages = outbox.messages()
    outbox.put(pb.Close(epoch=1), bytes(800))
    for _ in range(2):
        with pytest.raises(OutboxFull):
            outbox.put(pb.Close(epoch=2), bytes(800))
    assert epochs(await anext(messages)) == [1]
    outbox.put(pb.Close(epoch=3), bytes(800))
    assert epochs(await anext(messages)) == [3]


async def test_a_message_stays_below_the_limit_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_MESSAGE_BYTES", 100)
    outbox = Outbox()
    for epoch, num_bytes in ((1, 40), (2, 30), (3, 40), (4, 500), (5, 1)):
        outbox.put(pb.Close(epoch=epoch), bytes(num_bytes))
    outbox.close()
    assert [epochs(message) async for message in outbox.messages()] == [[1, 2], [3], [4], [5]]
