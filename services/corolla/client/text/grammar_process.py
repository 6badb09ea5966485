"""Checks the grammars of requests in a process of its own, before an answer is computed."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from corolla.chassis.errors import InvalidRequest, QueueFull
from corolla.chassis.fair_lock import FairLock
from corolla.chassis.metrics import GrammarMetrics
from corolla.client.text.formats import AnswerFormat, SchemaPart
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.text.tool_schemas import place_of_problem
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded
from corolla.models.tokenizer_text import tokenizer_text

_MOST_REMEMBERED: Final = 256
_LONGEST_WAIT_S: Final = 10.0
"""How long a request waits for the check of its grammar. For the first request, this includes reading the tokenizer."""
_MOST_WAITING: Final = 512


class GrammarProcess:
    """Checks grammars, and caches the results of the latest ones. Safe to use from several threads.

    Args:
        vocab_size: the number of the model's logits.
        end_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_token_ids: Collection[int], metrics: GrammarMetrics
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._metrics = metrics
        self._worker: WorkerProcess | None = None
        self._problems: OrderedDict[str, str | None] = OrderedDict()
        self._lock = threading.Lock()
        # The process checks one grammar at a time, so one thread that waits for it is enough.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._fair_lock = FairLock(_MOST_WAITING, "too many requests with new answer formats arrive at once")

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first request starts it."""
        return None if self._worker is None else self._worker.pid

    async def admit(self, tenant: str, form: AnswerFormat, received_ids: Sequence[int]) -> AnswerFormat:
        """Waits for the tenant's turn, then does what `check` does. Returns the form to use: this one, or its fallback.

        The refusal of a form with parts names the part that cannot be a grammar.
        """
        try:
            await self._admit(tenant, form, received_ids)
        except InvalidRequest as refusal:
            if refusal.violations[0][0] != form.field:
                raise  # the received tokens are at fault
            if form.fallback is not None:
                return await self.admit(tenant, form.fallback, received_ids)
            for name, part in form.parts.items():
                await self._admit_part(tenant, form.field, name, part)
            raise
        return form

    async def _admit_part(self, tenant: str, field: str, name: str, part: SchemaPart) -> None:
        try:
            await self._admit(tenant, AnswerFormat(part.grammar, field), ())
        except InvalidRequest as refusal:
            problem = refusal.violations[0][1]
            raise InvalidRequest("tools", f"{name}: {place_of_problem(part.schema, problem) or problem}") from None

    async def _admit(self, tenant: str, form: AnswerFormat, received_ids: Sequence[int]) -> None:
        if not received_ids and self._is_known(form):
            return self.check(form)
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S), self._fair_lock.hold(tenant):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._thread, self.check, form, received_ids)
        except TimeoutError:
            raise QueueFull("the answer formats of other callers take too long to check") from None

    def check(self, form: AnswerFormat, received_ids: Sequence[int] = ()) -> None:
        """Checks that answers can have this form, and that one can begin with `received_ids`. Blocks the thread.

        Raises:
            InvalidRequest: the form is invalid, takes too long or too much memory, or the tokens do not fit it.
            QueueFull: other callers' forms take too long.
            InternalError: the process ends again and again.
        """
        with self._lock:
            is_known, problem = form.grammar in self._problems, self._problems.get(form.grammar)
        is_tried = not is_known or bool(received_ids)
        try:
            if is_tried:
                problem = self._try(form, received_ids)
            if problem is not None:
                raise InvalidRequest(form.field, problem)
        except InvalidRequest:
            self._metrics.refused.inc()
            raise
        (self._metrics.compiled if is_tried else self._metrics.cached).inc()

    def _is_known(self, form: AnswerFormat) -> bool:
        with self._lock:
            return form.grammar in self._problems

    def _try(self, form: AnswerFormat, received_ids: Sequence[int]) -> str | None:
        worker = self._its_worker(form.field)
        try:
            with self._metrics.seconds.time():
                found = worker.ask([form.grammar, list(received_ids)])
        except WorkLimitExceeded as error:
            # If tokens were given, they may be the cause, so nothing is recorded about the grammar.
            found = "token_ids" if received_ids else "grammar", f"takes {error} to read"
        what: str
        problem: str | None
        what, problem = found or ("grammar", None)
        if problem is not None and what == "token_ids":
            raise InvalidRequest("received.ids", problem)
        with self._lock:
            self._problems[form.grammar] = problem
            if len(self._problems) > _MOST_REMEMBERED:
                self._problems.popitem(last=False)
        return problem

    def _its_worker(self, field: str) -> WorkerProcess:
        with self._lock:
            if self._worker is None:
                if not self._end_token_ids:
                    raise InvalidRequest(field, "this model has no end-of-sequence token that could end such an answer")
                text = tokenizer_text(self._tokenizer.hf_tokenizer)
                if text is None:
                    raise InvalidRequest(field, "is not possible with this model's tokenizer")
                beginning = [text, self._vocab_size, self._end_token_ids]
                self._worker = WorkerProcess(
                    "corolla.client.text.grammar_worker", beginning, "tries grammars", longest_wait_s=_LONGEST_WAIT_S
                )
            return self._worker

    def close(self) -> None:
        """Ends the process, if there is one, and waits for its end."""
        if self._worker is not None:
            self._worker.close()
