"""Bounds how many steps of a sequence are under way: enough to keep all hops of its chain busy."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, Self, TypeVar

from corolla.chain.pending import HiddenStates, RowFuture, discard, wait_for_result

Step = TypeVar("Step")

_MAX_STEPS_PER_HOP: Final = 2


class StepWindow(Generic[Step]):
    """The steps that were sent and have no answer yet, oldest first. Leaving the context drops those that remain.

    Args:
        num_hops: the number of hops that compute the steps.
        timeout_s: how long to wait for a row's answer, counted from the beginning of the wait.
        on_answer: is called with each step and its rows' hidden states, in the order of the steps.
        max_steps: the most steps under way at a time; 0: enough to keep all hops busy.
    """

    def __init__(
        self,
        num_hops: int,
        timeout_s: float,
        on_answer: Callable[[Step, Sequence[HiddenStates]], None],
        max_steps: int = 0,
    ) -> None:
        self._max_steps = max_steps or _MAX_STEPS_PER_HOP * num_hops
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._under_way: deque[tuple[Step, Sequence[RowFuture]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        discard(future for _, futures in self._under_way for future in futures)

    def add(self, step: Step, futures: Sequence[RowFuture]) -> None:
        """Adds the newest step, which was just sent; there must be room for it."""
        self._under_way.append((step, futures))

    async def make_room(self) -> None:
        """Waits for the oldest step if the window is full. Raises CorollaError if one of its rows failed."""
        if len(self._under_way) == self._max_steps:
            await self._take_oldest()

    async def drain(self) -> None:
        """Waits for all steps. Raises CorollaError if a row failed."""
        while self._under_way:
            await self._take_oldest()

    async def _take_oldest(self) -> None:
        step, futures = self._under_way[0]
        results = [await wait_for_result(future, self._timeout_s) for future in futures]
        self._under_way.popleft()
        self._on_answer(step, results)
