"""The window holds as many steps under way as keep the hops busy, by measured times, or fewer where that is said."""

import asyncio
from collections.abc import Sequence

import pytest

from corolla.chain.pending import HiddenStates, RowFuture
from corolla.chain.step_window import StepWindow
from corolla.chain.window_size import WindowSize
from corolla.v1 import blocks_pb2 as pb

RESULT = HiddenStates(b"", 0, pb.TENSOR_TYPE_UNSPECIFIED, 0)


@pytest.mark.parametrize("max_steps, expected", [(0, 4), (1, 1), (3, 3)])
async def test_a_window_has_room_for_so_many_steps(max_steps: int, expected: int) -> None:
    sent: list[int] = []
    answered: list[int] = []

    def note(step: int, _: Sequence[HiddenStates]) -> None:
        answered.append(step)

    futures: list[RowFuture] = [asyncio.get_running_loop().create_future() for _ in range(6)]
    with StepWindow[int](2, 60.0, note, max_steps) as window:

        async def send() -> None:
            for step, future in enumerate(futures):
                await window.make_room()
                window.add(step, [future])
                sent.append(step)
            await window.drain()

        sending = asyncio.create_task(send())
        for num_answered, future in enumerate(futures):
            # A step that waits is woken in the loop's next rounds.
            for _ in range(10):
                await asyncio.sleep(0)
            assert answered == list(range(num_answered))
            assert len(sent) == min(num_answered + expected, len(futures))
            future.set_result(RESULT)
        await sending
    assert answered == list(range(6))


def seconds_of(num_steps: int, hop_s: Sequence[float], link_s: float, size: WindowSize | None) -> float:
    """When the last answer comes, if hops compute steps one after the other; None: all steps are sent at once."""
    free_s = [0.0] * len(hop_s)
    sent_s: list[float] = []
    answered_s: list[float] = []
    num_taken, now_s = 0, 0.0
    for _ in range(num_steps):
        while size is not None and len(sent_s) - num_taken >= size.max_steps:
            now_s = max(now_s, answered_s[num_taken])
            size.answered(sent_s[num_taken], now_s)
            num_taken += 1
        sent_s.append(now_s)
        at_s = now_s
        for hop, seconds in enumerate(hop_s):
            free_s[hop] = at_s = max(at_s + link_s, free_s[hop]) + seconds
        answered_s.append(at_s + link_s)
    return answered_s[-1]


@pytest.mark.parametrize("hop_s", [(1.0,), (1.0, 1.0), (1.0, 3.0, 1.0)])
@pytest.mark.parametrize("link_s", [0.0, 0.1, 1.0, 4.0])
def test_no_hop_waits_for_a_step_however_long_the_links_are(hop_s: Sequence[float], link_s: float) -> None:
    """Otherwise a long prompt would wait for the links: with two steps for each hop, four times as long."""
    size = WindowSize(len(hop_s))
    assert seconds_of(64, hop_s, link_s, size) <= 1.4 * seconds_of(64, hop_s, link_s, None)
    if link_s <= 0.1:
        assert size.max_steps <= 2 * len(hop_s) + 1, "steps that only queue up are not sent"
    assert size.max_steps <= 16 * len(hop_s)


def test_answers_that_come_together_open_the_window_no_further_than_its_bound() -> None:
    size = WindowSize(2)
    for _ in range(5):
        size.answered(0.0, 1.0)
    assert size.max_steps == 32
