"""The trace span of a request, by OpenTelemetry's conventions for generative AI. It has counts and never text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from corolla.chassis.tracing import spans
from corolla.client.generation.admission import RequestCounts
from corolla.client.generation.request import AnyRequest


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """Begins and ends the trace spans of requests.

    Args:
        model: the model's name.
        trusts_callers: whether a caller's trace continues in the span; see `spans.request`.
    """

    model: str = ""
    trusts_callers: bool = False

    @contextmanager
    def request(self, request: AnyRequest) -> Iterator[None]:
        """Traces a request from its arrival to its end, and adds its counts at the end."""
        name = f"{request.operation} {self.model}"
        with spans.request(name, request.caller.trace, trusts_caller=self.trusts_callers) as span:
            if span.is_sampled:
                span.describe(self._asked(request))
            try:
                yield
            finally:
                if span.is_sampled:
                    span.describe(_used(request.caller.usage))

    def _asked(self, request: AnyRequest) -> dict[str, spans.Fact]:
        sampling = request.sampling
        asked: dict[str, spans.Fact] = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "corolla",
            "gen_ai.request.model": self.model,
            "gen_ai.request.choice.count": request.num_completions,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if request.max_tokens is not None:
            asked["gen_ai.request.max_tokens"] = request.max_tokens
        return asked


def _used(usage: RequestCounts) -> dict[str, spans.Fact]:
    used: dict[str, spans.Fact] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [reason.value for reason in usage.finish_reasons],
        "corolla.recoveries": usage.recoveries,
        "corolla.stall_seconds": usage.stall_s,
    }
    if usage.may_differ_from_token is not None:
        used["corolla.may_differ_from_token"] = usage.may_differ_from_token
    if usage.drafted_tokens:
        used |= {"corolla.drafted_tokens": usage.drafted_tokens, "corolla.accepted_tokens": usage.accepted_tokens}
    return used
