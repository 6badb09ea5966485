"""Which queued steps run together next. Pure: it holds no tensor, socket or clock.

The unit is a step as it arrived: rows that share a microbatch stay together down the chain. An iteration takes
decode steps and then prefill chunks up to a token budget, at least one of each kind that waits, so that neither keeps
the other out. One iteration computes one run of blocks; where steps of several runs wait, the runs take turns.

What decodes waits for the prompts of its iteration, and of those that it just missed. So while sessions decode, prefill
chunks have a smaller budget. Microbatches come in turns; so the last few iterations tell whether sessions decode.

Within decode steps and within prefill chunks, tenants share the server by start-time fair queueing, in tokens. So over
any time in which two tenants both have steps of a kind that could run, the tokens that they get differ by no more than
the longest step of each together.
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
# A session that decodes comes again after its step went through the other hops, while some iterations pass here.
_DECODE_MEMORY: Final = 8


@dataclass(frozen=True, slots=True)
class QueuedStep(Generic[Item]):
    """A step as the scheduler sees it; `item` is carried along untouched.

    Attributes:
        tenant_tokens: how many of the step's tokens are whose. A step of several tenants goes by the one that is due
            first, and is charged to each.
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
        """Its stamp; given when it is first asked for, which is when no earlier step of its session waits any more."""
        if self._stamp is None:
            self._stamp = min(starmap(account.stamp, self.step.tenant_tokens.items()))
        return self._stamp


class Scheduler(Generic[Item]):
    """Steps of one session never overtake, and never run together.

    Nothing starves. Of its own kind and run, a step that could run waits only for lower stamps: of each other tenant,
    for at most as many tokens as its own tenant has in line before it, and two longest steps. At each turn of its run
    the lowest stamp of each kind leaves, and the turn comes after at most one of each other run.

    Args:
        max_batch_tokens: tokens of one iteration, save that the first step of each kind goes whatever its length.
        max_queued_steps: a further step is refused.
        max_prefill_tokens_during_decode: prefill tokens of one iteration while sessions decode; None for no such limit.
    """

    def __init__(
        self, max_batch_tokens: int, max_queued_steps: int, *, max_prefill_tokens_during_decode: int | None = None
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_prefill_tokens_during_decode = max_prefill_tokens_during_decode or max_batch_tokens
        self._num_batches_since_decode = _DECODE_MEMORY
        self._max_queued_steps = max_queued_steps
        # In order of arrival.
        self._queue: list[_Entry[Item]] = []
        self._accounts: defaultdict[tuple[Span, bool], FairQueueing] = defaultdict(FairQueueing)
        # Runs of blocks that steps wait for; the next one in turn is first.
        self._turns: deque[Span] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, step: QueuedStep[Item], *, is_bounded: bool = True) -> None:
        """Raises QueueFull, unless the step is of those whose number something else bounds."""
        if is_bounded and len(self._queue) >= self._max_queued_steps:
            raise QueueFull("a block server has too many queued steps")
        self._queue.append(_Entry(step))
        if step.blocks not in self._turns:
            self._turns.append(step.blocks)

    def next_batch(self) -> list[QueuedStep[Item]]:
        """Takes the steps of the next iteration out of the queue: one run of blocks, each session at most once."""
        if len(self._queue) < 2:
            # A single queued step skips fair queueing, and leaves no account.
            alone = [entry.step for entry in self._queue]
            if alone:
                self._note(has_decode=alone[0].is_decode)
            self._queue.clear()
            self._turns.clear()
            self._accounts.clear()
            return alone
        heads = self._heads()
        # The oldest step of all is a head, so some run has one.
        blocks = next(blocks for blocks in self._turns if any(entry.step.blocks == blocks for entry in heads))
        self._note(has_decode=any(entry.step.is_decode for entry in heads))
        batch: list[_Entry[Item]] = []
        for is_decode in _DECODE_FIRST:
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
        """Steps that have no earlier step of the same session before them."""
        seen: set[bytes] = set()
        heads = []
        for entry in self._queue:
            if seen.isdisjoint(entry.step.session_ids):
                heads.append(entry)
            seen |= entry.step.session_ids
        return heads


def _first_due(waiting: Sequence[_Entry[Item]], account: FairQueueing, max_tokens: int) -> list[_Entry[Item]]:
    """Those with the lowest stamps, as far as the tokens go; the first one in any case."""
    taken: list[_Entry[Item]] = []
    num_tokens = 0
    # Sorting keeps the order of arrival among equals.
    for entry in sorted(waiting, key=lambda entry: entry.due(account)):
        num_tokens += entry.step.num_tokens
        # One that does not fit is not overtaken by others of its kind: it is the first the next time.
        if taken and num_tokens > max_tokens:
            break
        taken.append(entry)
        account.serve(entry.due(account))
    return taken
