"""Decides how many tokens to draft before the next step. Pure: times are passed in.

A step that checks `k` draft tokens costs more than a plain one, and yields between 1 and `k + 1` tokens. `DraftLength`
measures costs and yields while the answer grows, and takes the draft length with the most expected tokens per second:
0 where plain steps are faster. The expected number of tokens is that of speculative decoding (Leviathan et al. 2023).
"""

from collections.abc import Callable, Sequence
from typing import Final

MAX_DRAFT_TOKENS: Final = 64

# Speculation may lose this share of all time and, at the beginning, the time of this many plain steps.
_ALLOWANCE: Final = 0.02
_FIRST_CREDIT_STEPS: Final = 0.6
# The credit is capped, so that speculation soon stops when a text becomes hard to predict.
_MAX_CREDIT_STEPS: Final = 4.0
_PROBE_TOKENS: Final = 2

_RATE_DECAY: Final = 0.85
_PRIOR_TRIES: Final = 2.0
_COST_DECAY: Final = 0.9
_PRIOR_COSTS: Final = ((1, 1.15), (16, 1.6))
_PRIOR_COST_WEIGHT: Final = 0.5
_PLAIN_WEIGHT: Final = 0.2
# Something else stalled a step that took many times the usual time, so its time counts only up to this factor.
_OUTLIER: Final = 3.0
# After this many steps with drafts, one plain step measures the duration of plain steps again.
_MAX_STEPS_WITHOUT_PLAIN: Final = 100


class DraftLength:
    """Chooses the draft lengths of one answer, from the durations of its steps and the accepted draft tokens.

    Speculation has a credit: it may lose `_ALLOWANCE` of all time, and the time that it saved before. So an answer
    whose draft tokens are all wrong takes only a few percent longer than without drafts, and drafts are still tried now
    and then.

    Args:
        max_tokens: the longest draft.
        first_rates: for each kind of evidence, the expected share of right draft tokens, before any was checked.
        is_adaptive: False always drafts the most tokens that are allowed.
    """

    def __init__(self, max_tokens: int, first_rates: Sequence[float], *, is_adaptive: bool = True) -> None:
        self._is_adaptive = is_adaptive
        self._max_tokens = max_tokens
        self._hits = [rate * _PRIOR_TRIES for rate in first_rates]
        self._tries = [_PRIOR_TRIES for _ in first_rates]
        self._plain_s: float | None = None
        self._num_steps_without_plain = 0
        self._credit_s = 0.0
        self._cost = _StepCost()
        # The cost of a long draft is unknown until shorter ones were measured.
        self._most_tokens = _PROBE_TOKENS

    def choose(self, evidence: int, max_tokens: int) -> int:
        """How many tokens to draft on evidence of this kind, at most `max_tokens`; 0 for a plain step."""
        max_tokens = min(max_tokens, self._max_tokens)
        if not self._is_adaptive:
            return max_tokens
        if self._plain_s is None or self._num_steps_without_plain >= _MAX_STEPS_WITHOUT_PLAIN:
            return 0
        rate = self._hits[evidence] / self._tries[evidence]
        cost = self._cost.line(self._plain_s)
        num_affordable = best = 0
        best_speed = 1 / self._plain_s
        num_expected = 1.0
        for num_drafted in range(1, min(max_tokens, self._most_tokens) + 1):
            seconds = cost(num_drafted)
            # The credit must cover the case that every draft token is wrong.
            if seconds - self._plain_s > self._credit_s:
                break
            num_affordable = num_drafted
            num_expected += rate**num_drafted
            if num_expected / seconds > best_speed:
                best, best_speed = num_drafted, num_expected / seconds
        return best or min(num_affordable, _PROBE_TOKENS)

    def observe(self, evidence: int | None, num_drafted: int, num_accepted: int, seconds: float) -> None:
        """Learns from a step that took `seconds`, drafting included; without evidence or draft tokens it was plain.

        Args:
            num_accepted: how many draft tokens were right before the first wrong one.
        """
        if not num_drafted or evidence is None:
            self._observe_plain(seconds)
            return
        plain_s = self._plain_s or seconds
        seconds = min(seconds, _OUTLIER * self._cost.line(plain_s)(num_drafted))
        self._num_steps_without_plain += 1
        self._most_tokens = max(self._most_tokens, 2 * num_drafted)
        self._cost.observe(num_drafted, seconds)
        num_tries = min(num_accepted + 1, num_drafted)
        self._hits[evidence] = _RATE_DECAY * self._hits[evidence] + num_accepted
        self._tries[evidence] = _RATE_DECAY * self._tries[evidence] + num_tries
        earned_s = (1 + num_accepted) * plain_s - seconds + _ALLOWANCE * seconds
        self._credit_s = min(self._credit_s + earned_s, _MAX_CREDIT_STEPS * plain_s)

    def _observe_plain(self, seconds: float) -> None:
        self._num_steps_without_plain = 0
        if self._plain_s is None:
            self._plain_s = seconds
            self._credit_s = _FIRST_CREDIT_STEPS * seconds
            return
        seconds = min(seconds, _OUTLIER * self._plain_s)
        self._plain_s += _PLAIN_WEIGHT * (seconds - self._plain_s)
        self._credit_s = min(self._credit_s + _ALLOWANCE * seconds, _MAX_CREDIT_STEPS * self._plain_s)


class _StepCost:
    """Estimates a step's duration from its number of draft tokens, by a line fitted mostly to the newest steps."""

    def __init__(self) -> None:
        self._weight = self._sum_tokens = self._sum_squares = self._sum_seconds = self._sum_products = 0.0

    def observe(self, num_drafted: int, seconds: float) -> None:
        self._weight = _COST_DECAY * self._weight + 1
        self._sum_tokens = _COST_DECAY * self._sum_tokens + num_drafted
        self._sum_squares = _COST_DECAY * self._sum_squares + num_drafted**2
        self._sum_seconds = _COST_DECAY * self._sum_seconds + seconds
        self._sum_products = _COST_DECAY * self._sum_products + num_drafted * seconds

    def line(self, plain_s: float) -> Callable[[int], float]:
        """The line from draft tokens to seconds, never below `plain_s`; before any step, `plain_s` alone decides it."""
        weight, tokens, squares = self._weight, self._sum_tokens, self._sum_squares
        seconds, products = self._sum_seconds, self._sum_products
        for prior_tokens, prior_steps in _PRIOR_COSTS:
            weight += _PRIOR_COST_WEIGHT
            tokens += _PRIOR_COST_WEIGHT * prior_tokens
            squares += _PRIOR_COST_WEIGHT * prior_tokens**2
            seconds += _PRIOR_COST_WEIGHT * prior_steps * plain_s
            products += _PRIOR_COST_WEIGHT * prior_tokens * prior_steps * plain_s
        slope = max(0.0, (weight * products - tokens * seconds) / (weight * squares - tokens**2))
        first_s = (seconds - slope * tokens) / weight
        return lambda num_drafted: max(plain_s, first_s + slope * num_drafted)
