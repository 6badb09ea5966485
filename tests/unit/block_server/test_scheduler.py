"""Properties of the batches that the scheduler forms, whatever comes in whatever order."""

from collections.abc import Sequence
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

Step = QueuedStep[int]


@st.composite
def steps(draw: st.DrawFn) -> tuple[frozenset[bytes], int, bool, Span]:
    sessions = draw(st.frozensets(st.sampled_from(SESSIONS), min_size=1, max_size=3))
    is_decode = draw(st.booleans())
    num_tokens = len(sessions) if is_decode else draw(st.integers(len(sessions) + 1, 2 * BUDGET))
    return sessions, num_tokens, is_decode, draw(st.sampled_from(RUNS))


# What happens: a step arrives, or (None) an iteration takes a batch.
HAPPENINGS = st.lists(st.one_of(steps(), st.none()), max_size=80)


def play(happenings: Sequence[tuple[frozenset[bytes], int, bool, Span] | None]) -> tuple[list[Step], list[list[Step]]]:
    """All steps in order of arrival, and all batches until the queue is empty."""
    scheduler: Scheduler[int] = Scheduler(BUDGET, max_queued_steps=1000)
    numbers = count()
    arrived: list[Step] = []
    batches: list[list[Step]] = []
    for happening in happenings:
        if happening is None:
            batches.append(scheduler.next_batch())
        else:
            arrived.append(QueuedStep(*happening, next(numbers)))
            scheduler.add(arrived[-1])
    while len(scheduler):
        batches.append(scheduler.next_batch())
        assert batches[-1], "a queue that is not empty gives a batch"
    return arrived, [batch for batch in batches if batch]


@given(HAPPENINGS)
def test_every_step_runs_exactly_once(happenings: list[tuple[frozenset[bytes], int, bool, Span] | None]) -> None:
    arrived, batches = play(happenings)
    assert sorted(step.item for batch in batches for step in batch) == [step.item for step in arrived]


@given(HAPPENINGS)
def test_steps_of_a_session_run_in_order_and_never_together(
    happenings: list[tuple[frozenset[bytes], int, bool, Span] | None],
) -> None:
    _, batches = play(happenings)
    for session in SESSIONS:
        ran = [[step.item for step in batch if session in step.session_ids] for batch in batches]
        assert all(len(items) <= 1 for items in ran)
        flat = [item for items in ran for item in items]
        assert flat == sorted(flat)


@given(HAPPENINGS)
def test_a_batch_is_one_run_of_blocks_within_the_budget(
    happenings: list[tuple[frozenset[bytes], int, bool, Span] | None],
) -> None:
    _, batches = play(happenings)
    for batch in batches:
        assert len({step.blocks for step in batch}) == 1
        # One chunk comes along whatever the budget says; the rest keeps to it, unless a single step has more.
        prefills = [step.num_tokens for step in batch if not step.is_decode]
        within = sum(step.num_tokens for step in batch) - (prefills[0] if prefills else 0)
        assert within <= BUDGET or len(batch) == 1 + bool(prefills)
        assert [step.is_decode for step in batch] == sorted((step.is_decode for step in batch), reverse=True)


@given(st.lists(steps(), min_size=1, max_size=12), st.lists(steps(), min_size=1, max_size=3))
def test_no_step_starves_behind_those_that_keep_coming(
    waiting: list[tuple[frozenset[bytes], int, bool, Span]], crowd: list[tuple[frozenset[bytes], int, bool, Span]]
) -> None:
    scheduler: Scheduler[int] = Scheduler(BUDGET, max_queued_steps=1000)
    for number, step in enumerate(waiting):
        scheduler.add(QueuedStep(*step, number))
    left = set(range(len(waiting)))
    # The oldest step leaves in one iteration out of two at the latest, however many come after it.
    for _ in range(2 * len(waiting)):
        left -= {step.item for step in scheduler.next_batch()}
        for step in crowd:
            scheduler.add(QueuedStep(*step, -1))
    assert not left


def test_decode_steps_go_before_prompts_but_one_chunk_comes_along() -> None:
    scheduler: Scheduler[str] = Scheduler(max_batch_tokens=4, max_queued_steps=10)
    blocks = Span(0, 2)
    scheduler.add(QueuedStep(frozenset({b"long"}), 100, False, blocks, "chunk"))
    scheduler.add(QueuedStep(frozenset({b"other"}), 100, False, blocks, "later chunk"))
    scheduler.add(QueuedStep(frozenset({b"a", b"b"}), 2, True, blocks, "gang"))
    assert [step.item for step in scheduler.next_batch()] == ["gang", "chunk"]
    assert [step.item for step in scheduler.next_batch()] == ["later chunk"]
    assert scheduler.next_batch() == []


def test_a_full_queue_refuses() -> None:
    scheduler: Scheduler[None] = Scheduler(max_batch_tokens=4, max_queued_steps=2)
    step: QueuedStep[None] = QueuedStep(frozenset({b"a"}), 1, True, Span(0, 1), None)
    scheduler.add(step)
    scheduler.add(step)
    with pytest.raises(QueueFull):
        scheduler.add(step)
    assert len(scheduler) == 2
