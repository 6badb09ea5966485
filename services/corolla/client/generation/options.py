"""What a caller may say about an answer, checked."""

from dataclasses import dataclass

from corolla.client.generation.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is to be made and when it ends. `max_tokens` None leaves it to the service."""

    sampling: SamplingParams
    max_tokens: int | None
    stop_sequences: tuple[str, ...]
    ignore_eos: bool
    time_limit_s: float | None
