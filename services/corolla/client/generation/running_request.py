"""A request while it runs, and how it gets there: its quotas, its place in the line, its grammar and its counts."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from corolla.chain.recovery_budget import RecoveryReport
from corolla.chain.session import ChainSession
from corolla.chassis.errors import InvalidRequest
from corolla.client.generation.admission import Admission, AdmissionTicket, RequestMeter
from corolla.client.generation.answer import Answer, Delta
from corolla.client.generation.answer_room import AnswerRoom
from corolla.client.generation.loop import AnswerReader, Prefill, generate
from corolla.client.generation.request import AnyRequest
from corolla.client.generation.request_trace import RequestTraces
from corolla.client.metrics import ClientMetrics
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

    def deltas(
        self, session: ChainSession, answer: Answer, prefill: Prefill, room: AnswerRoom, index: int = 0
    ) -> AsyncGenerator[Sequence[Delta], None]:
        """Generates an answer's deltas, including those that its caller has already."""
        if session.mixes_numerics:
            self.meter.count_doubt(0)
        reader = AnswerReader(answer, self.meter.started_s)
        return generate(session, answer, reader, prefill, partial(room.grow, index), self.meter.count_drafts)


@dataclass(frozen=True, slots=True)
class Entrance:
    """Lets requests in, one after another, as quotas and the line allow."""

    quotas: QuotaEnforcer
    admission: Admission
    grammars: GrammarProcess
    metrics: ClientMetrics
    traces: RequestTraces

    @asynccontextmanager
    async def enter(self, request: AnyRequest) -> AsyncIterator[RunningRequest]:
        """Holds a request's quotas and its place in the line until its end.

        Raises QuotaExceeded, QueueFull, or InvalidRequest.
        """
        caller, num_sequences = request.caller, request.num_completions
        until_s = caller.waits_until_s(request.time_limit_s)
        with self.traces.request(request):
            async with (
                self.quotas.running(
                    caller.tenant, num_sequences, caller.usage, is_streamed=caller.is_streamed
                ) as allowance,
                self.admission.enter(caller.tenant, num_sequences) as ticket,
            ):
                request = replace(request, grammar=await self._checked_grammar(request))
                with RequestMeter(self.metrics, caller.usage, 0 if request.is_reading else num_sequences) as meter:
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
