"""The length of drafts: gains where draft tokens are right, next to no loss where they are wrong. Time is simulated."""

import random
from collections.abc import Callable

import pytest

from corolla.decoding.speculation import DraftLength

NUM_TOKENS = 300

# Seconds of a step by the number of draft tokens that it carries: links that dominate, a small processor where a second
# row is dear, a large one where rows are free, and a draft model that costs with every draft token.
COSTS: dict[str, Callable[[int], float]] = {
    "slow links": lambda num_drafted: 0.1 + 0.002 * num_drafted,
    "small processor": lambda num_drafted: 0.06 if num_drafted == 0 else 0.095 + 0.003 * num_drafted,
    "large processor": lambda num_drafted: 0.02,
    "draft model": lambda num_drafted: 0.05 + 0.012 * num_drafted,
    "ruinous": lambda num_drafted: 0.05 if num_drafted == 0 else 0.2 + 0.05 * num_drafted,
}


class Answer:
    """One answer whose draft tokens are right with a given rate."""

    def __init__(self, cost: Callable[[int], float], *, noise: float = 0.1, max_tokens: int = 16) -> None:
        self.length = DraftLength(max_tokens, (0.8,))
        self.drafts: list[int] = []
        self._cost = cost
        self._noise = noise
        self._random = random.Random(4)

    def seconds(self, num_tokens: int, rate: float) -> float:
        """How long so many tokens take."""
        total_s = 0.0
        while num_tokens > 0:
            num_drafted = self.length.choose(0, 100)
            num_accepted = 0
            while num_accepted < num_drafted and self._random.random() < rate:
                num_accepted += 1
            seconds = self._cost(num_drafted) * (1 + self._noise * self._random.uniform(-1, 1))
            self.length.observe(0 if num_drafted else None, num_drafted, num_accepted, seconds)
            self.drafts.append(num_drafted)
            total_s += seconds
            num_tokens -= 1 + num_accepted
        return total_s


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_draft_tokens_that_are_always_rejected_cost_next_to_nothing(cost: Callable[[int], float]) -> None:
    answer = Answer(cost)
    assert answer.seconds(NUM_TOKENS, 0.0) <= NUM_TOKENS * cost(0) / 0.95
    # It does try again now and then.
    assert any(answer.drafts[NUM_TOKENS // 2 :]) or cost(1) - cost(0) > 0.02 * NUM_TOKENS * cost(0) / 2


@pytest.mark.parametrize(
    "cost, least_gain", [("slow links", 4.0), ("small processor", 3.0), ("large processor", 6.0), ("draft model", 2.0)]
)
def test_drafts_that_are_mostly_accepted_grow_long(cost: str, least_gain: float) -> None:
    answer = Answer(COSTS[cost])
    assert NUM_TOKENS * COSTS[cost](0) / answer.seconds(NUM_TOKENS, 0.95) >= least_gain
    assert max(answer.drafts) > 8


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_no_rate_makes_an_answer_much_slower(cost: Callable[[int], float]) -> None:
    for rate in (0.1, 0.3, 0.5, 0.7):
        assert Answer(cost).seconds(NUM_TOKENS, rate) <= NUM_TOKENS * cost(0) / 0.95


def test_speculation_adapts_to_a_changing_text() -> None:
    cost = COSTS["small processor"]
    answer = Answer(cost)
    answer.seconds(NUM_TOKENS, 0.95)
    assert answer.seconds(NUM_TOKENS, 0.0) <= NUM_TOKENS * cost(0) / 0.95
    assert answer.seconds(2 * NUM_TOKENS, 0.95) <= 2 * NUM_TOKENS * cost(0) / 1.5


def test_a_stall_changes_neither_cost_estimate() -> None:
    length = DraftLength(8, (0.9,))
    length.observe(None, 0, 0, 0.1)
    chosen = length.choose(0, 8)
    assert chosen > 0
    length.observe(0, chosen, chosen, 60.0)
    length.observe(None, 0, 0, 60.0)
    for _ in range(100):
        length.observe(None, 0, 0, 0.1)
    assert length.choose(0, 8) > 0


def test_kinds_of_evidence_are_kept_apart() -> None:
    length = DraftLength(8, (0.9, 0.9))
    length.observe(None, 0, 0, 0.1)
    for _ in range(10):
        length.observe(0, 8, 8, 0.13)
        length.observe(1, 4, 0, 0.13)
    assert length.choose(0, 8) == 8
    assert length.choose(1, 8) < 8


def test_speculation_never_drafts_more_than_allowed() -> None:
    length = DraftLength(5, (0.99,), is_adaptive=False)
    assert [length.choose(0, room) for room in (0, 3, 9)] == [0, 3, 5]
    adaptive = DraftLength(5, (0.99,))
    assert adaptive.choose(0, 9) == 0, "a plain step must be measured first"
    adaptive.observe(None, 0, 0, 0.1)
    assert adaptive.choose(0, 0) == 0
    adaptive.observe(0, 2, 2, 0.1)
    assert adaptive.choose(0, 9) <= 5
