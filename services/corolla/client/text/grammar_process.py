"""Tries the grammars of requests in a process of its own, before anything of an answer is computed."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from corolla.chassis.errors import InvalidRequest
from corolla.client.text.formats import AnswerFormat
from corolla.client.text.tokenizer import TextTokenizer
from corolla.client.text.worker_process import RanAway, WorkerProcess
from corolla.models.tokenizer_text import tokenizer_text

_MOST_REMEMBERED: Final = 256
_LONGEST_WAIT_S: Final = 10.0
"""The first request waits until the tokenizer is read."""


class GrammarProcess:
    """Safe to use from several threads; its methods block. What was found of the latest grammars is remembered.

    Args:
        vocab_size: how many logits the model has for a token.
        end_token_ids: of the model.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = sorted(end_token_ids)
        self._worker: WorkerProcess | None = None
        self._problems: OrderedDict[str, str | None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process; None while it is not needed."""
        return None if self._worker is None else self._worker.pid

    def check(self, form: AnswerFormat, received_ids: Sequence[int] = ()) -> None:
        """Returns where answers of this form can be made, and one that has these tokens be continued.

        Raises:
            InvalidRequest: the form is none, takes too long or too much memory, or the answer is not of it.
            QueueFull: others' forms take too long.
            InternalError: the process ends again and again.
        """
        with self._lock:
            is_known, problem = form.grammar in self._problems, self._problems.get(form.grammar)
        if not is_known or received_ids:
            problem = self._try(form, received_ids)
        if problem is not None:
            raise InvalidRequest(form.field, problem)

    def _try(self, form: AnswerFormat, received_ids: Sequence[int]) -> str | None:
        try:
            found = self._its_worker(form.field).ask([form.grammar, list(received_ids)])
        except RanAway as error:
            found = "grammar", f"takes {error} to read"
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
                    raise InvalidRequest(field, "answers of a form cannot be made with this model's tokenizer")
                beginning = [text, self._vocab_size, self._end_token_ids]
                self._worker = WorkerProcess(
                    "corolla.client.text.grammar_worker", beginning, "tries grammars", longest_wait_s=_LONGEST_WAIT_S
                )
            return self._worker

    def close(self) -> None:
        """Ends the process, if there is one, and waits for that."""
        if self._worker is not None:
            self._worker.close()
