"""Open-loop load: when requests are sent, and statistics of answers. Pure: times and random numbers are passed in.

Requests are sent on schedule, whether or not the service keeps up, and their times count from the scheduled moment. So
a service that falls behind has longer times, not fewer requests.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PERCENTILES: Final = (50, 90, 99)
REFUSED: Final = "RESOURCE_EXHAUSTED"


def arrivals_s(seconds: float, gap_s: Callable[[], float]) -> Iterator[float]:
    """The times at which requests are sent, in seconds from the start: the first at once, the last before `seconds`.

    Args:
        gap_s: draws the time to the next request; an exponential distribution gives a Poisson process.
    """
    now_s = 0.0
    while now_s < seconds:
        yield now_s
        now_s += gap_s()


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """The times of one answer.

    Attributes:
        meant_s: when its request was scheduled.
        token_s: when each token arrived.
    """

    meant_s: float
    token_s: Sequence[float]

    @property
    def first_token_s(self) -> float:
        return self.token_s[0] - self.meant_s

    @property
    def gaps_s(self) -> list[float]:
        """The seconds from each token to the next one."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def total_s(self) -> float:
        return self.token_s[-1] - self.meant_s


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The time limits that a good answer keeps.

    Attributes:
        first_token_s: the most seconds until the first token.
        inter_token_s: the most seconds between two tokens.
    """

    first_token_s: float
    inter_token_s: float

    def is_kept(self, answer: AnswerTimes) -> bool:
        return answer.first_token_s <= self.first_token_s and max(answer.gaps_s, default=0.0) <= self.inter_token_s


@dataclass(slots=True)
class Load:
    """The results of the requests so far.

    Attributes:
        failures: the number of failures by label.
        num_sent: the number of requests that were sent; some of them may still be running.
    """

    num_sent: int = 0
    answers: list[AnswerTimes] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        return len(self.answers) + self.failures.total()

    def summary(self, level: ServiceLevel, elapsed_s: float) -> dict[str, Any]:
        """The facts that `--json` prints: counts, rates over `elapsed_s`, and percentiles of times in seconds."""
        good = [each for each in self.answers if level.is_kept(each)]
        return {
            "seconds": elapsed_s,
            "requests": self.num_sent,
            "answers": len(self.answers),
            "unfinished": self.num_sent - self.num_done,
            "failures": dict(sorted(self.failures.items())),
            "answers_per_s": len(self.answers) / elapsed_s,
            "tokens_per_s": num_tokens(self.answers) / elapsed_s,
            "good_answers": len(good),
            "goodput_answers_per_s": len(good) / elapsed_s,
            "goodput_tokens_per_s": num_tokens(good) / elapsed_s,
            "first_token_s": percentiles([each.first_token_s for each in self.answers]),
            "inter_token_s": percentiles([gap for each in self.answers for gap in each.gaps_s]),
            "answer_s": percentiles([each.total_s for each in self.answers]),
        }


def num_tokens(answers: Sequence[AnswerTimes]) -> int:
    return sum(len(each.token_s) for each in answers)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so many per cent of all do not exceed, for each of PERCENTILES; empty without values."""
    ordered = sorted(values)
    return {f"p{percent}": ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in PERCENTILES if ordered}
