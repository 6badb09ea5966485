"""Which queued steps run together next. Pure: it holds no tensor, socket or clock.

The unit is a step as it arrived: rows that a client service gathered stay together down the chain. An iteration takes
every decode step and then prefill chunks up to a token budget, at least one, so that neither starves the other. One
iteration computes one run of blocks; a step of another run, left behind at the head of the queue, leads the next one.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from corolla.chassis.errors import QueueFull
from corolla.wire.span import Span

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class QueuedStep(Generic[Item]):
    """A step as the scheduler sees it; `item` is carried along untouched."""

    session_ids: frozenset[bytes]
    num_tokens: int
    is_decode: bool
    blocks: Span
    item: Item


class Scheduler(Generic[Item]):
    """First come, first served within decode steps and within prefill chunks; steps of one session never overtake.

    Args:
        max_batch_tokens: tokens of one iteration, unless a single step has more.
        max_queued_steps: a further step is refused.
    """

    def __init__(self, max_batch_tokens: int, max_queued_steps: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_queued_steps = max_queued_steps
        self._queue: deque[QueuedStep[Item]] = deque()
        self._left_behind: QueuedStep[Item] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, step: QueuedStep[Item]) -> None:
        """Raises QueueFull."""
        if len(self._queue) >= self._max_queued_steps:
            raise QueueFull("a block server has too many queued steps")
        self._queue.append(step)

    def next_batch(self) -> list[QueuedStep[Item]]:
        """Takes the steps of the next iteration out of the queue: one run of blocks, each session at most once."""
        if not self._queue:
            return []
        eligible = self._heads()
        first = next((step for step in eligible if step.is_decode), eligible[0])
        if eligible[0] is self._left_behind:
            first = eligible[0]
        batch: list[QueuedStep[Item]] = []
        num_tokens = 0
        has_prefill = False
        for step in sorted(eligible, key=lambda step: not step.is_decode):
            fits = not batch or num_tokens + step.num_tokens <= self._max_batch_tokens
            # Decode steps must not keep prefill out for ever: one chunk comes along whatever the budget says.
            owed = not step.is_decode and not has_prefill
            if step.blocks == first.blocks and (fits or owed):
                batch.append(step)
                num_tokens += step.num_tokens
                has_prefill |= not step.is_decode
        taken = {id(step) for step in batch}
        self._queue = deque(step for step in self._queue if id(step) not in taken)
        self._left_behind = self._queue[0] if self._queue else None
        return batch

    def _heads(self) -> list[QueuedStep[Item]]:
        """Steps that have no earlier step of the same session before them."""
        seen: set[bytes] = set()
        heads = []
        for step in self._queue:
            if seen.isdisjoint(step.session_ids):
                heads.append(step)
            seen |= step.session_ids
        return heads
