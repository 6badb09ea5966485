"""What a caller may say about an answer, checked."""

from dataclasses import dataclass, field

from corolla.client.generation.resumption import Resumption
from corolla.client.generation.sampling import SamplingParams
from corolla.client.generation.speculator import SpeculationOptions


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is to be made and when it ends.

    `max_tokens` None leaves it to the service; `resumption` is None for a request without a name.
    """

    sampling: SamplingParams
    max_tokens: int | None
    stop_sequences: tuple[str, ...]
    ignore_eos: bool
    time_limit_s: float | None
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    resumption: Resumption | None = None
