"""Bounds the size of a sequence's steps, and how many are under way: enough to keep all hops of its chain busy."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, Self, TypeVar

from corolla.chain.clock import time_s
from corolla.chain.pending import HiddenStates, RowFuture, discard, wait_for_result
from corolla.chain.window_size import WindowSize

Step = TypeVar("Step")


MIN_CHUNK_TOKENS: Final = 64
"""A product of a matrix with fewer rows than this costs clearly more per row."""

_CHUNKS_PER_HOP: Final = 4


def chunk_tokens(num_tokens: int, num_hops: int, max_tokens: int) -> int:
    """Tokens of each chunk of a text of `num_tokens`, at most `max_tokens`; the last chunk may have fewer.

    With `k` chunks, all of `s` hops are busy except in `s - 1` of `k + s - 1` rounds (the pipeline bubble of GPipe,
    Huang et al. 2019), so a text gets several chunks for each hop. Chunks that are too small cost more than they
    gain, and with a single hop there is nothing to gain.

    Args:
        num_hops: hops that are busy at a time.
    """
    if num_hops == 1:
        return max_tokens
    even = -(-num_tokens // (_CHUNKS_PER_HOP * num_hops))
    return min(max(even, MIN_CHUNK_TOKENS), max_tokens)


def whole_units(position: int, num_tokens: int, unit: int, *, is_last: bool) -> int:
    """Tokens of a chunk that ends at a multiple of `unit`, where that is possible.

    Where servers keep states, the unit is a page: other texts find the states at its end, and since they continue only
    before their last token, the last chunk of a prompt begins at the last end of a page. Elsewhere only the last chunk
    is cut, so that it is small: other hops have nothing more to do while the last one computes it, and standbys lack
    it when the first token comes, so a loss at that moment computes it again.

    Args:
        position: where the chunk begins.
        num_tokens: how many tokens it would have otherwise, at least 1.
        unit: tokens; 0: the chunk stays as it is.
        is_last: whether the prompt would end with this chunk.
    """
    end = position + num_tokens
    whole = unit and (end - is_last) // unit * unit
    return whole - position if whole > position else num_tokens


class StepWindow(Generic[Step]):
    """The steps that were sent and have no answer yet, oldest first. Leaving the context drops those that remain.

    Args:
        timeout_s: how long to wait for a row's answer, counted from the beginning of the wait.
        on_answer: is called with each step and its rows' hidden states, in the order of the steps.
        max_steps: the most steps under way at a time; 0: as many as keep all hops busy, by measured times.
    """

    def __init__(
        self,
        num_hops: int,
        timeout_s: float,
        on_answer: Callable[[Step, Sequence[HiddenStates]], None],
        max_steps: int = 0,
    ) -> None:
        self._max_steps = max_steps
        self._size = WindowSize(num_hops)
        self._timeout_s = timeout_s
        self._on_answer = on_answer
        self._under_way: deque[tuple[Step, Sequence[RowFuture], float]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        discard(future for _, futures, _ in self._under_way for future in futures)

    def add(self, step: Step, futures: Sequence[RowFuture]) -> None:
        """Adds the newest step, which was just sent; there must be room for it."""
        self._under_way.append((step, futures, time_s()))

    async def make_room(self) -> None:
        """Waits for the oldest steps while the window is full. Raises CorollaError if one of their rows failed."""
        while len(self._under_way) >= (self._max_steps or self._size.max_steps):
            await self._take_oldest()

    async def drain(self) -> None:
        """Waits for all steps. Raises CorollaError if a row failed."""
        while self._under_way:
            await self._take_oldest()

    async def _take_oldest(self) -> None:
        step, futures, sent_s = self._under_way[0]
        results = [await wait_for_result(future, self._timeout_s) for future in futures]
        self._under_way.popleft()
        self._size.answered(sent_s, time_s())
        self._on_answer(step, results)
