"""The window holds as many steps under way as keep the hops busy, or fewer where that is said."""

import asyncio
from collections.abc import Sequence

import pytest

from corolla.chain.pending import HiddenStates, RowFuture
from corolla.chain.step_window import StepWindow
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
