"""How long a router waits for the Kubernetes API, and how long it leaves it alone."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ApiWaits:
    """All in seconds.

    Attributes:
        answer_s: for an answer.
        after_forbidden_s: before pods are listed again by a router that may not list them.
        after_failures_s: before something is written again after several failures.
    """

    answer_s: float = 5.0
    after_forbidden_s: float = 60.0
    after_failures_s: float = 30.0


DEFAULT_WAITS: Final = ApiWaits()
