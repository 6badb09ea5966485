"""The span of a request, by OpenTelemetry's conventions for generative AI. It says how much, and never what."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from corolla.chassis.tracing import spans
from corolla.client.generation.admission import Caller
from corolla.decoding.parameters import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """Begins the spans of requests.

    Args:
        model: its name.
        trusts_callers: see `spans.request`.
    """

    model: str = ""
    trusts_callers: bool = False

    @contextmanager
    def request(
        self, caller: Caller, sampling: SamplingParams, max_tokens: int | None, num_completions: int
    ) -> Iterator[None]:
        """A request from its coming in to its end; what it used is in its caller's usage by then."""
        name = f"{caller.operation} {self.model}"
        with spans.request(name, caller.trace, trusts_caller=self.trusts_callers) as span:
            if span.is_sampled:
                span.describe(self._asked(caller, sampling, max_tokens, num_completions))
            try:
                yield
            finally:
                if span.is_sampled:
                    span.describe(_used(caller))

    def _asked(
        self, caller: Caller, sampling: SamplingParams, max_tokens: int | None, num_completions: int
    ) -> dict[str, spans.Fact]:
        asked: dict[str, spans.Fact] = {
            "gen_ai.operation.name": caller.operation,
            "gen_ai.provider.name": "corolla",
            "gen_ai.request.model": self.model,
            "gen_ai.request.choice.count": num_completions,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if max_tokens is not None:
            asked["gen_ai.request.max_tokens"] = max_tokens
        return asked


def _used(caller: Caller) -> dict[str, spans.Fact]:
    usage = caller.usage
    used: dict[str, spans.Fact] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [reason.value for reason in usage.finish_reasons],
        "corolla.recoveries": usage.recoveries,
        "corolla.stall_seconds": usage.stall_s,
    }
    if usage.drafted_tokens:
        used |= {"corolla.drafted_tokens": usage.drafted_tokens, "corolla.accepted_tokens": usage.accepted_tokens}
    return used
