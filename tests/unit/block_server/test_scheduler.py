"""Properties of the batches that the scheduler forms, for any steps in any order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.scheduler import QueuedStep, Scheduler
from corolla.chassis.errors import QueueFull
from corolla.wire.span import Span

BUDGET = 16
RUNS = (Span(0, 2), Span(1, 3), Span(0, 3))
SESSIONS = [bytes([number]) for number in range(6)]
TENANTS = ("ada", "bob", "cyd")
MAX_STEP_TOKENS = 2 * BUDGET

Step = QueuedStep[int]


@dataclass(frozen=True)
class Arriving:
    """A step before it has a number."""

    sessions: frozenset[bytes]
    tenant_tokens: dict[str, int]
    is_decode: bool
    blocks: Span

    def numbered(self, number: int) -> Step:
        return QueuedStep(self.sessions, self.tenant_tokens, self.is_decode, self.blocks, number)


@st.composite
def steps(draw: st.DrawFn) -> Arriving:
    sessions = draw(st.frozensets(st.sampled_from(SESSIONS), min_size=1, max_size=3))
    is_decode = draw(st.booleans())
    num_tokens = len(sessions) if is_decode else draw(st.integers(len(sessions) + 1, MAX_STEP_TOKENS))
    tenants = draw(st.lists(st.sampled_from(TENANTS), min_size=1, max_size=min(2, num_tokens), unique=True))
    num_of_first = num_tokens - len(tenants) + 1
    tenant_tokens = {tenant: num_of_first if not index else 1 for index, tenant in enumerate(tenants)}
    return Arriving(sessions, tenant_tokens, is_decode, draw(st.sampled_from(RUNS)))


# What happens: a step arrives, or (None) an iteration takes a batch.
HAPPENINGS = st.lists(st.one_of(steps(), st.none()), max_size=80)


def play(
    happenings: Sequence[Arriving | None], max_prefill_tokens_during_decode: int | None = None
) -> tuple[list[Step], list[list[Step]]]:
    """All steps in order of arrival, and all batches until the queue is empty."""
    scheduler: Scheduler[int] = Scheduler(
        BUDGET, max_queued_steps=1000, max_prefill_tokens_during_decode=max_prefill_tokens_during_decode
    )
    numbers = count()
    arrived: list[Step] = []
    batches: list[list[Step]] = []
    for happening in happenings:
        if happening is None:
            batches.append(scheduler.next_batch())
        else:
            arrived.append(happening.numbered(next(numbers)))
            scheduler.add(arrived[-1])
    while len(scheduler):
        batches.append(scheduler.next_batch())
        assert batches[-1], "a queue that is not empty gives a batch"
    return arrived, [batch for batch in batches if batch]


@given(HAPPENINGS)
def test_every_step_runs_exactly_once(happenings: list[Arriving | None]) -> None:
    arrived, batches = play(happenings)
    assert sorted(step.item for batch in batches for step in batch) == [step.item for step in arrived]


@given(HAPPENINGS)
def test_steps_of_a_session_run_in_order_and_never_together(happenings: list[Arriving | None]) -> None:
    _, batches = play(happenings)
    for session in SESSIONS:
        ran = [[step.item for step in batch if session in step.session_ids] for batch in batches]
        assert all(len(items) <= 1 for items in ran)
        flat = [item for items in ran for item in items]
        assert flat == sorted(flat)


@given(HAPPENINGS)
def test_a_batch_is_one_run_of_blocks_within_the_budget(happenings: list[Arriving | None]) -> None:
    _, batches = play(happenings)
    for batch in batches:
        assert len({step.blocks for step in batch}) == 1
        # The first of each kind comes whatever the budget says; the others fit into the budget.
        for number, step in enumerate(batch):
            is_first = all(before.is_decode != step.is_decode for before in batch[:number])
            assert is_first or sum(each.num_tokens for each in batch[: number + 1]) <= BUDGET
        assert [step.is_decode for step in batch] == sorted((step.is_decode for step in batch), reverse=True)


@given(HAPPENINGS, st.integers(1, BUDGET))
def test_decode_steps_wait_for_few_prompt_tokens(happenings: list[Arriving | None], max_during_decode: int) -> None:
    arrived, batches = play(happenings, max_during_decode)
    assert sorted(step.item for batch in batches for step in batch) == [step.item for step in arrived]
    for number, batch in enumerate(batches):
        chunks = [step.num_tokens for step in batch if not step.is_decode]
        if any(step.is_decode for each in batches[max(0, number - 1) : number + 1] for step in each):
            assert sum(chunks) <= max_during_decode or len(chunks) == 1


@pytest.mark.parametrize("decodes_alone", [False, True])
def test_prompts_get_the_whole_budget_when_no_session_decodes(decodes_alone: bool) -> None:
    scheduler: Scheduler[str] = Scheduler(
        max_batch_tokens=40, max_queued_steps=1000, max_prefill_tokens_during_decode=10
    )
    scheduler.add(QueuedStep(frozenset({b"d"}), {"ada": 1}, True, RUNS[0], "token"))
    if decodes_alone:
        assert len(scheduler.next_batch()) == 1
    for number in range(100):
        scheduler.add(QueuedStep(frozenset({bytes([number])}), {"ada": 10}, False, RUNS[0], "chunk"))
    sizes = [sum(step.item == "chunk" for step in scheduler.next_batch()) for _ in range(20)]
    num_small = 7 if decodes_alone else 8
    assert sizes == [1] * num_small + [4] * (20 - num_small)


@given(st.lists(steps(), max_size=12), steps(), st.lists(st.lists(steps(), max_size=6), min_size=1, max_size=6))
def test_no_step_starves_behind_those_that_keep_coming(
    waiting: list[Arriving], watched: Arriving, crowds: list[list[Arriving]]
) -> None:
    scheduler: Scheduler[int] = Scheduler(BUDGET, max_queued_steps=100_000)
    for number, arriving in enumerate(waiting):
        scheduler.add(arriving.numbered(number))
    watched_number = len(waiting)
    scheduler.add(watched.numbered(watched_number))
    # Steps are stamped a whole step or less after another of their tenant, and a microbatch is in line for each tenant.
    # So before the watched step leave no more tokens of another tenant than were in line before it, and two longest
    # steps; and at each turn of its run leaves one of its kind, or one that its session waits for.
    num_before = sum(sum(each.tenant_tokens.values()) for each in waiting)
    max_turns = len(waiting) + (len(TENANTS) - 1) * (num_before + 2 * MAX_STEP_TOKENS)
    for number in range(len(RUNS) * (max_turns + 1) * (len(waiting) + 1)):
        if watched_number in [step.item for step in scheduler.next_batch()]:
            return
        for arriving in crowds[number % len(crowds)]:
            scheduler.add(arriving.numbered(-1))
    pytest.fail("still waiting")


@given(st.data(), st.sampled_from([True, False]))
def test_tenants_shares_differ_by_at_most_the_longest_step_of_each(data: st.DataObject, is_decode: bool) -> None:
    """The bound holds as long as each of them has steps that could run, and under any flood of one of them."""
    scheduler: Scheduler[str] = Scheduler(BUDGET, max_queued_steps=100_000)
    longest = {tenant: data.draw(st.integers(1, MAX_STEP_TOKENS), label=tenant) for tenant in TENANTS}
    sessions = count()
    waiting: Counter[str] = Counter()
    served: Counter[str] = Counter()
    ahead: dict[tuple[str, str], list[int]] = {(one, other): [] for one in TENANTS for other in TENANTS}

    def arrive(tenant: str, num_tokens: int) -> None:
        session = next(sessions).to_bytes(4, "big")
        scheduler.add(QueuedStep(frozenset({session}), {tenant: num_tokens}, is_decode, RUNS[0], tenant))
        waiting[tenant] += num_tokens

    for flooding in data.draw(st.lists(st.sampled_from(TENANTS), min_size=5, max_size=25), label="floods"):
        for tenant in TENANTS:
            # Each tenant gets what one iteration can take, so that its queue never runs dry within it.
            while tenant == flooding or waiting[tenant] <= BUDGET + longest[tenant]:
                arrive(tenant, data.draw(st.integers(1, longest[tenant])))
                if waiting[tenant] > 4 * (BUDGET + longest[tenant]):
                    break
        for step in scheduler.next_batch():
            waiting[step.item] -= step.num_tokens
            served[step.item] += step.num_tokens
            for one, other in ahead:
                ahead[one, other].append(served[one] - served[other])
    for (one, other), differences in ahead.items():
        # Over any interval, not only from the beginning.
        assert max(differences) - min(differences) <= longest[one] + longest[other]


def test_an_idle_tenant_earns_no_credit() -> None:
    scheduler: Scheduler[str] = Scheduler(max_batch_tokens=10, max_queued_steps=100)

    def add(tenant: str, number: int) -> None:
        scheduler.add(QueuedStep(frozenset({tenant.encode() + bytes([number])}), {tenant: 10}, False, RUNS[0], tenant))

    for number in range(10):
        add("ada", number)
    for _ in range(4):
        scheduler.next_batch()
    for number in range(6):
        add("bob", number)
    assert [step.item for _ in range(6) for step in scheduler.next_batch()] == ["bob", "ada"] * 3


def test_decode_steps_go_before_prompts_but_one_chunk_comes_along() -> None:
    scheduler: Scheduler[str] = Scheduler(max_batch_tokens=4, max_queued_steps=10)
    blocks = Span(0, 2)
    scheduler.add(QueuedStep(frozenset({b"long"}), {"ada": 100}, False, blocks, "chunk"))
    scheduler.add(QueuedStep(frozenset({b"other"}), {"ada": 100}, False, blocks, "later chunk"))
    scheduler.add(QueuedStep(frozenset({b"a", b"b"}), {"ada": 1, "bob": 1}, True, blocks, "microbatch"))
    assert [step.item for step in scheduler.next_batch()] == ["microbatch", "chunk"]
    assert [step.item for step in scheduler.next_batch()] == ["later chunk"]
    assert scheduler.next_batch() == []


def test_a_full_queue_refuses() -> None:
    scheduler: Scheduler[None] = Scheduler(max_batch_tokens=4, max_queued_steps=2)
    step: QueuedStep[None] = QueuedStep(frozenset({b"a"}), {"ada": 1}, True, Span(0, 1), None)
    scheduler.add(step)
    scheduler.add(step)
    with pytest.raises(QueueFull):
        scheduler.add(step)
    assert len(scheduler) == 2


def test_prompts_that_may_not_join_decode_steps_wait_for_the_next_iteration() -> None:
    scheduler: Scheduler[int] = Scheduler(BUDGET, 10)
    prompt, decode = (
        QueuedStep(frozenset([SESSIONS[number]]), {"ada": 2 - number}, bool(number), RUNS[0], number)
        for number in range(2)
    )
    scheduler.add(prompt)
    scheduler.add(decode)
    assert scheduler.next_batch(takes_prompts=False) == [decode]
    assert scheduler.next_batch(takes_prompts=False) == [prompt], "no step decodes"
