"""What a request used."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Usage:
    """Counted while the request runs; times in seconds from its start."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    recoveries: int = 0
    stall_s: float = 0.0
    time_to_first_token_s: float = 0.0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def count_token(self) -> None:
        if not self.completion_tokens:
            self.time_to_first_token_s = self.elapsed_s
        self.completion_tokens += 1
