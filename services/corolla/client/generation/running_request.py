"""A request while it runs, and how it gets there: its quotas, its place in the line, its grammar and its counts."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.session import ChainSession
from corolla.chassis.errors import InvalidRequest
from corolla.chassis.tracing import spans
from corolla.client.generation.admission import Admission, AdmissionTicket, RequestMeter
from corolla.client.generation.answer import Answer
from corolla.client.generation.request import AnyRequest
from corolla.client.metrics import ClientMetrics
from corolla.client.output_parsing.deltas import Delta
from corolla.client.quotas.enforcer import Allowance, QuotaEnforcer
from corolla.client.text.grammar_process import GrammarProcess
from corolla.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request with its grammar, and what bounds and counts it until its end.

    `until_s`: when the caller stops waiting, by the event loop's clock.
    """

    request: AnyRequest
    allowance: Allowance
    ticket: AdmissionTicket
    meter: RequestMeter
    until_s: float

    def recovery_counter(self, answer: Answer | None) -> Callable[[RecoveryReport], None]:
        """Returns what counts a recovery in mid-answer; without an answer, only the prompt is read."""

        def count(report: RecoveryReport) -> None:
            self.meter.count_recovery(report)
            if report.mixes_numerics:
                self.meter.count_doubt(0 if answer is None else len(answer.tokens))

        return count

    def check_drafts(self, session: ChainSession) -> None:
        """Raises InvalidRequest if the chain lacks the wanted draft model. A resumed answer goes on without one."""
        may_lack_one = session.has_draft_model or self.request.resumption.num_received > 0
        if self.request.speculation.mode == pb.SPECULATION_MODE_DRAFT_MODEL and not may_lack_one:
            raise InvalidRequest(
                "speculation.mode", "is not possible, since the block servers have no draft model; use prompt lookup"
            )


async def next_deltas(
    session: ChainSession,
    answer: Answer,
    grow: Callable[[ChainSession], Awaitable[bool]],
    count_drafts: Callable[[int, int], None],
) -> Sequence[Delta]:
    """Waits for the next tokens of an answer that continues; returns their deltas. The hops compute further tokens.

    Tokens that arrived while the caller handled the last ones come together: a slow caller gets fewer messages.

    A step may carry draft tokens. Every token is the choice of the session's sampler from the chain's logits, in order
    and with the same random numbers; a draft token never changes a choice. If it proves right, the logits for the next
    choice are already computed. So the tokens are those of plain decoding, seeded sampling included. (That is
    speculative sampling, Leviathan et al. 2023, with target and draft drawn by the same random numbers.)

    Args:
        grow: gives a session that is full room for more tokens; returns False if there is none.
        count_drafts: takes the number of draft tokens that a step checked, and how many of them were right.
    """
    if session.is_full and not await grow(session):
        answer.cut_off()
        return answer.deltas()
    is_read = False
    while answer.finish_reason is None and (session.has_unread_tokens or not is_read):
        num_drafted, num_taken = await session.decode(answer)
        is_read = True
        if num_drafted:
            count_drafts(num_drafted, num_taken - 1)
    return answer.deltas()


@dataclass(frozen=True, slots=True)
class Entrance:
    """Lets requests in, one after another, as quotas and the line allow, and traces them.

    A request's trace span follows OpenTelemetry's conventions for generative AI. It has counts and never text.

    Args:
        model: the model's name.
        trusts_callers: whether a caller's trace continues in the span; see `spans.request`.
    """

    quotas: QuotaEnforcer
    admission: Admission
    grammars: GrammarProcess
    metrics: ClientMetrics
    model: str = ""
    trusts_callers: bool = False

    @asynccontextmanager
    async def enter(self, request: AnyRequest) -> AsyncIterator[RunningRequest]:
        """Holds a request's quotas and its place in the line until its end.

        Raises QuotaExceeded, QueueFull, or InvalidRequest.
        """
        caller, num_sequences = request.caller, request.num_completions
        until_s = caller.waits_until_s(request.time_limit_s)
        meter = RequestMeter(self.metrics, caller, 0 if request.is_reading else num_sequences)
        with self._traced(request, meter):
            async with (
                self.quotas.running(
                    caller.tenant, num_sequences, caller.usage, is_streamed=caller.is_streamed
                ) as allowance,
                self.admission.enter(caller.tenant, num_sequences) as ticket,
            ):
                request = replace(request, grammar=await self._checked_grammar(request))
                with meter:
                    yield RunningRequest(request, allowance, ticket, meter, until_s)

    async def _checked_grammar(self, request: AnyRequest) -> str:
        """The grammar of the request's form; empty without one. The caller learns what it does not follow.

        Raises InvalidRequest for a form that no answer can have, or that the received tokens do not fit.
        """
        if request.form is None:
            return ""
        admitted = await self.grammars.admit(request.caller.tenant, request.form, request.resumption.received_ids)
        request.caller.name_ignored(admitted.ignored)
        return admitted.grammar

    @contextmanager
    def _traced(self, request: AnyRequest, meter: RequestMeter) -> Iterator[None]:
        """Traces a request from its arrival to its end, and adds its counts at the end."""
        name = f"{request.operation} {self.model}"
        with spans.request(name, request.caller.trace, trusts_caller=self.trusts_callers) as span:
            if span.is_sampled:
                span.describe(_asked(request, self.model))
            try:
                yield
            finally:
                if span.is_sampled:
                    span.describe(_used(request.caller.usage, meter))


def _asked(request: AnyRequest, model: str) -> dict[str, spans.Fact]:
    sampling = request.sampling
    asked: dict[str, spans.Fact] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "corolla",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": request.num_completions,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if request.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = request.max_tokens
    return asked


def _used(usage: pb.Usage, meter: RequestMeter) -> dict[str, spans.Fact]:
    used: dict[str, spans.Fact] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [reason.value for reason in meter.finish_reasons],
        "corolla.recoveries": usage.recoveries,
        "corolla.stall_seconds": usage.stall_seconds,
    }
    if usage.HasField("may_differ_from_token"):
        used["corolla.may_differ_from_token"] = usage.may_differ_from_token
    if usage.drafted_tokens:
        used |= {"corolla.drafted_tokens": usage.drafted_tokens, "corolla.accepted_tokens": usage.accepted_tokens}
    return used
