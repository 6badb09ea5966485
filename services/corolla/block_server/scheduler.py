"""Decides which queued steps run together next. Pure: it holds no tensor, socket or clock.

It never splits a step, so that the rows of a microbatch stay together down the chain. An iteration takes decode steps
and then prefill chunks up to a token budget, at least one of each kind that waits, so that neither keeps the other out.
These are the iterations of Orca (Yu et al. 2022) with the chunked prefills of Sarathi-Serve (Agrawal et al. 2024). One
iteration computes one run of blocks; where steps of several runs wait, the runs take turns.

A decode step waits for the prompts of its own iteration, and of the one that runs when it arrives. So while sessions
decode, prefill chunks have a smaller budget. Microbatches take turns on a hop. So sessions may still decode although
one iteration had no decode step; only after several such iterations does the scheduler assume that none does.

Decode steps and prefill chunks have separate fair queueing (start-time), which shares the server's tokens among
tenants. While two tenants both have steps of one kind that could run, the tokens of this kind that they get differ by
at most the longest step of one plus the longest step of the other.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Final, Generic, TypeVar

from corolla.chassis.errors import QueueFull
from corolla.chassis.fair_queueing import FairQueueing
from corolla.wire.span import Span

Item = TypeVar("Item")

_DECODE_FIRST: Final = (True, False)
# How many iterations without a decode step pass before prefill chunks get the whole budget. Until then, the decode
# steps may just be on other hops.
_DECODE_MEMORY: Final = 8


@dataclass(frozen=True, slots=True)
class QueuedStep(Generic[Item]):
    """A step as the scheduler sees it; `item` is not looked at.

    Attributes:
        tenant_tokens: the number of the step's tokens for each tenant. A step of several tenants has the place of the
            tenant that is due first, and each tenant is charged for its own tokens.
    """

    session_ids: frozenset[bytes]
    tenant_tokens: Mapping[str, int]
    is_decode: bool
    blocks: Span
    item: Item

    @property
    def num_tokens(self) -> int:
        return sum(self.tenant_tokens.values())


@dataclass(slots=True)
class _Entry(Generic[Item]):
    step: QueuedStep[Item]
    _stamp: int | None = None

    def due(self, account: FairQueueing) -> int:
        """The step's stamp, given at the first call. Call it only when no earlier step of the same sessions waits."""
        if self._stamp is None:
            self._stamp = min(starmap(account.stamp, self.step.tenant_tokens.items()))
        return self._stamp


class Scheduler(Generic[Item]):
    """Orders steps. Steps of one session never overtake each other, and never run together.

    No step starves. Once no earlier step of its sessions waits, a step waits only for steps with lower stamps, of the
    same kind and the same run of blocks. Among these steps, no other tenant has more tokens than the step's own tenant
    has there, plus two steps of the largest size. In each turn of a run of blocks, the step with the lowest stamp of
    each kind leaves. Between two turns of a run, each other run has at most one turn.

    Args:
        max_batch_tokens: the most tokens of one iteration; the first step of each kind may exceed it.
        max_queued_steps: the most steps that wait; a further step is refused.
        max_prefill_tokens_during_decode: the most prefill tokens of an iteration while sessions decode; None: no limit.
    """

    def __init__(
        self, max_batch_tokens: int, max_queued_steps: int, *, max_prefill_tokens_during_decode: int | None = None
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_prefill_tokens_during_decode = max_prefill_tokens_during_decode or max_batch_tokens
        self._num_batches_since_decode = _DECODE_MEMORY
        self._max_queued_steps = max_queued_steps
        # Steps are in order of arrival.
        self._queue: list[_Entry[Item]] = []
        self._accounts: defaultdict[tuple[Span, bool], FairQueueing] = defaultdict(FairQueueing)
        # Runs of blocks that steps wait for; the next one in turn is first.
        self._turns: deque[Span] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, step: QueuedStep[Item], *, is_bounded: bool = True) -> None:
        """Queues a step. Raises QueueFull if the queue is full and `is_bounded`."""
        if is_bounded and len(self._queue) >= self._max_queued_steps:
            raise QueueFull("a block server has too many queued steps")
        self._queue.append(_Entry(step))
        if step.blocks not in self._turns:
            self._turns.append(step.blocks)

    def next_batch(self, *, takes_prompts: bool = True) -> list[QueuedStep[Item]]:
        """Takes the steps of the next iteration out of the queue: one run of blocks, each session at most once.

        Args:
            takes_prompts: whether prefill chunks may join decode steps; without decode steps they leave in any case.
        """
        if len(self._queue) < 2:
            # A single queued step needs no fair queueing, and leaves no account.
            alone = [entry.step for entry in self._queue]
            if alone:
                self._note(has_decode=alone[0].is_decode)
            self._queue.clear()
            self._turns.clear()
            self._accounts.clear()
            return alone
        heads = self._heads()
        # The oldest step waits for no other step and is a head, so at least one run of blocks has a head.
        blocks = next(blocks for blocks in self._turns if any(entry.step.blocks == blocks for entry in heads))
        self._note(has_decode=any(entry.step.is_decode for entry in heads))
        batch: list[_Entry[Item]] = []
        for is_decode in _DECODE_FIRST:
            if batch and not takes_prompts:
                break
            waiting = [entry for entry in heads if (entry.step.blocks, entry.step.is_decode) == (blocks, is_decode)]
            max_tokens = self._max_batch_tokens - sum(entry.step.num_tokens for entry in batch)
            if not is_decode and self._num_batches_since_decode < _DECODE_MEMORY:
                max_tokens = min(max_tokens, self._max_prefill_tokens_during_decode)
            batch += _first_due(waiting, self._accounts[blocks, is_decode], max_tokens)
        self._remove(batch, blocks)
        return [entry.step for entry in batch]

    def _note(self, *, has_decode: bool) -> None:
        self._num_batches_since_decode = 0 if has_decode else self._num_batches_since_decode + 1

    def _remove(self, batch: Iterable[_Entry[Item]], blocks: Span) -> None:
        taken = set(map(id, batch))
        self._queue = [entry for entry in self._queue if id(entry) not in taken]
        self._turns.remove(blocks)
        if any(entry.step.blocks == blocks for entry in self._queue):
            self._turns.append(blocks)
        else:
            for is_decode in _DECODE_FIRST:
                del self._accounts[blocks, is_decode]

    def _heads(self) -> list[_Entry[Item]]:
        """The steps that wait for no earlier step of the same session."""
        seen: set[bytes] = set()
        heads = []
        for entry in self._queue:
            if seen.isdisjoint(entry.step.session_ids):
                heads.append(entry)
            seen |= entry.step.session_ids
        return heads


def _first_due(waiting: Sequence[_Entry[Item]], account: FairQueueing, max_tokens: int) -> list[_Entry[Item]]:
    """The steps with the lowest stamps that fit into `max_tokens`, and the first one in any case."""
    taken: list[_Entry[Item]] = []
    num_tokens = 0
    # Sorting keeps the order of arrival among equals.
    for entry in sorted(waiting, key=lambda entry: entry.due(account)):
        num_tokens += entry.step.num_tokens
        # Steps of the same kind do not overtake a step that does not fit: it is the first the next time.
        if taken and num_tokens > max_tokens:
            break
        taken.append(entry)
        account.serve(entry.due(account))
    return taken
