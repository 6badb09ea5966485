"""Open-loop load: when requests are sent, and what their times say. Pure: times and random numbers are passed in.

Requests come when they come, whether or not the service keeps up, and their times count from when they were meant to be
sent. So a service that falls behind shows it in each of them, and not in fewer of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PERCENTILES: Final = (50, 90, 99)
REFUSED: Final = "RESOURCE_EXHAUSTED"


def arrivals_s(seconds: float, gap_s: Callable[[], float]) -> Iterator[float]:
    """When requests are sent, in seconds from the beginning: the first at once, the last before `seconds` are over.

    Args:
        gap_s: draws the time to the next one; exponentially distributed, they are a Poisson process.
    """
    now_s = 0.0
    while now_s < seconds:
        yield now_s
        now_s += gap_s()


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """One answer.

    Attributes:
        meant_s: when it was meant to be asked for.
        token_s: when each token came.
    """

    meant_s: float
    token_s: Sequence[float]

    @property
    def first_token_s(self) -> float:
        return self.token_s[0] - self.meant_s

    @property
    def gaps_s(self) -> list[float]:
        """From each token to the next one."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def total_s(self) -> float:
        return self.token_s[-1] - self.meant_s


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What an answer has to keep to be a good one.

    Attributes:
        first_token_s: it began by then.
        inter_token_s: no further token took longer.
    """

    first_token_s: float
    inter_token_s: float

    def is_kept(self, answer: AnswerTimes) -> bool:
        return answer.first_token_s <= self.first_token_s and max(answer.gaps_s, default=0.0) <= self.inter_token_s


@dataclass(slots=True)
class Load:
    """What has come of the requests so far.

    Attributes:
        failures: by their labels.
        num_sent: of which some may still be under way.
    """

    num_sent: int = 0
    answers: list[AnswerTimes] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def num_done(self) -> int:
        return len(self.answers) + self.failures.total()

    def summary(self, level: ServiceLevel, elapsed_s: float) -> dict[str, Any]:
        """As `--json` prints it: rates over `elapsed_s`, and times in seconds by percentiles; none without answers."""
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
    """The smallest value that so many per cent of all do not exceed, for each of PERCENTILES; nothing of nothing."""
    ordered = sorted(values)
    return {f"p{percent}": ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in PERCENTILES if ordered}
