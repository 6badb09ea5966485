"""Makes and tries the grammars of requests in a process of its own, before an answer is computed."""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from corolla.chassis.errors import InvalidRequest, QueueFull
from corolla.chassis.fair_lock import FairLock
from corolla.chassis.metrics import GrammarMetrics
from corolla.client.text.formats import AnswerFormat
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded
from corolla.models.tokenizer import tokenizer_text

_MOST_REMEMBERED: Final = 256
_LONGEST_WAIT_S: Final = 10.0
"""How long a request waits for the check of its grammar. For the first request, this includes reading the tokenizer."""
_MOST_WAITING: Final = 512


@dataclass(frozen=True, slots=True)
class AdmittedForm:
    """A form that answers can have.

    Attributes:
        grammar: its grammar, as hops read it.
        ignored: the places in the request of what the grammar does not follow.
    """

    grammar: str
    ignored: tuple[str, ...] = ()


_Result = AdmittedForm | tuple[tuple[str, str], ...]
"""An admitted form, or what is wrong with it, by field."""


class GrammarProcess:
    """Makes grammars in one thread, and caches the latest ones, which the event loop reads, too."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_token_ids: Collection[int], metrics: GrammarMetrics
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._metrics = metrics
        self._worker: WorkerProcess | None = None
        self._results: OrderedDict[str, _Result] = OrderedDict()
        # The process checks one grammar at a time, so one thread that waits for it is enough.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._fair_lock = FairLock(_MOST_WAITING, "too many requests with new answer formats arrive at once")

    @property
    def pid(self) -> int | None:
        """The id of the process; None before the first request starts it."""
        return None if self._worker is None else self._worker.pid

    async def admit(self, tenant: str, form: AnswerFormat, received_ids: Sequence[int]) -> AdmittedForm:
        """Waits for the tenant's turn, then does what `check` does."""
        if not received_ids and form.text in self._results:
            return self.check(form)
        try:
            async with asyncio.timeout(_LONGEST_WAIT_S), self._fair_lock.hold(tenant):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self.check, form, received_ids)
        except TimeoutError:
            raise QueueFull("the answer formats of other callers take too long to check") from None

    def check(self, form: AnswerFormat, received_ids: Sequence[int] = ()) -> AdmittedForm:
        """Makes the grammar of a form with which an answer can begin with `received_ids`. Blocks the thread.

        Where no grammar can follow a schema that need not be followed, the form does without it.

        Raises:
            InvalidRequest: the form is invalid, takes too long or too much memory, or the tokens do not fit it.
            QueueFull: other callers' forms take too long.
            InternalError: the process ends again and again.
        """
        result = self._results.get(form.text)
        is_tried = result is None or bool(received_ids)
        try:
            if is_tried:
                result = self._try(form, received_ids)
        except InvalidRequest:
            self._metrics.refused.inc()
            raise
        if isinstance(result, AdmittedForm):
            (self._metrics.compiled if is_tried else self._metrics.cached).inc()
            return replace(result, ignored=(*form.ignored, *result.ignored))
        if form.loosened is not None:
            return self.check(form.loosened, received_ids)
        self._metrics.refused.inc()
        first, *more = result or ()
        raise InvalidRequest(*first, *more)

    def _try(self, form: AnswerFormat, received_ids: Sequence[int]) -> _Result:
        worker = self._its_worker(form.field)
        result: _Result
        fits = True
        try:
            with self._metrics.seconds.time():
                answer = worker.ask([form.text, list(received_ids)])
        except WorkLimitExceeded as error:
            if received_ids:
                # The tokens may be the cause, so nothing is recorded about the form.
                raise InvalidRequest("received.ids", f"takes {error} to read") from None
            result = ((form.field, f"takes {error} to read"),)
        else:
            if violations := answer.get("violations"):
                result = tuple((name, problem) for name, problem in violations)
            else:
                result, fits = AdmittedForm(answer["grammar"], tuple(answer["ignored"])), answer["fits"]
        self._results[form.text] = result
        if len(self._results) > _MOST_REMEMBERED:
            self._results.popitem(last=False)
        if not fits:
            raise InvalidRequest("received.ids", "must be the beginning of an answer in this response format")
        return result

    def _its_worker(self, field: str) -> WorkerProcess:
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
