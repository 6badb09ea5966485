"""Compiles the grammars that answers must follow, for the model's tokenizer. The last hop needs them to choose tokens.

"Reading" a grammar means here to parse and to compile it.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from corolla.chassis.errors import InternalError, MalformedMessage
from corolla.chassis.fair_lock import FairLock
from corolla.chassis.metrics import GrammarMetrics
from corolla.decoding.grammar import AnswerGrammar
from corolla.decoding.grammar_text import UnreadableGrammar, grammar_tokenizer, read_grammar
from corolla.models.checkpoint import Checkpoint, end_token_ids_of
from corolla.models.tokenizer import load_tokenizer, tokenizer_text

_MOST_KEPT: Final = 64
_MOST_WAITING: Final = 4096
"""The most grammars that wait to be read. When another last hop dies, all answers of several client services may come
here at once."""
_STACK_BYTES: Final = 128 << 20
"""The stack of the thread that reads grammars, which follows nested rules by recursion. Unused parts take no memory."""

# `threading.stack_size` sets the stack of all threads that the process starts until it is set again.
_starting = threading.Lock()


class Grammars:
    """Reads grammars and keeps the most recently used ones. Safe to use from several threads.

    One thread does nothing but read the grammars, one after the other, and tenants take turns; other work does not
    wait for it. The first grammar makes it load the tokenizer, which takes about a second. Most servers never need it.
    """

    def __init__(self, checkpoint: Checkpoint, metrics: GrammarMetrics) -> None:
        self._checkpoint = checkpoint
        self._metrics = metrics
        self._tokenizer: LLTokenizer | None = None
        self._read: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = _deep_thread()
        self._fair_lock = FairLock(_MOST_WAITING, "too many grammars wait to be read on a block server")

    async def read(self, tenant: str, text: str) -> None:
        """Returns when the grammar has been read. As long as the grammar is kept, `begin` need not read it again.

        Raises:
            QueueFull: too many grammars wait to be read, and this tenant has more of them than others.
            MalformedMessage: the text is not a valid grammar.
            InternalError: the model's tokenizer cannot be read, or does not allow grammars.
        """
        if self.has(text):
            self._metrics.cached.inc()
            return
        async with self._fair_lock.hold(tenant):
            await asyncio.wrap_future(self._later(text))

    def begin(self, text: str, token_ids: Sequence[int]) -> AnswerGrammar:
        """Returns the grammar's state after these tokens of an answer. It may take seconds if the grammar is new here.

        Raises:
            MalformedMessage: the text is not a valid grammar, or the answer breaks it.
            InternalError: the model's tokenizer cannot be read, or does not allow grammars.
        """
        matcher = self._copy(text)
        if matcher is None:
            matcher = self._later(text).result()
        grammar = AnswerGrammar(matcher)
        if not grammar.add_all(token_ids):
            raise MalformedMessage("sampler.token_ids", "are not the beginning of an answer that fits the grammar")
        return grammar

    def has(self, text: str) -> bool:
        """The grammar was read, and is kept."""
        with self._lock:
            return text in self._read

    def _later(self, text: str) -> Future[LLMatcher]:
        def read() -> LLMatcher:
            if (matcher := self._copy(text)) is not None:  # an earlier caller has read it meanwhile
                self._metrics.cached.inc()
                return matcher
            try:
                matcher = self._matcher(text)
            except MalformedMessage:
                self._metrics.refused.inc()
                raise
            self._metrics.compiled.inc()
            return self._keep(text, matcher)

        return self._reading.submit(read)

    def _copy(self, text: str) -> LLMatcher | None:
        with self._lock:
            matcher = self._read.get(text)
            if matcher is None:
                return None
            self._read.move_to_end(text)
            return matcher.deep_copy()

    def _keep(self, text: str, matcher: LLMatcher) -> LLMatcher:
        """Keeps a grammar, and returns a copy of it."""
        with self._lock:
            self._read[text] = matcher
            if len(self._read) > _MOST_KEPT:
                self._read.popitem(last=False)
            return matcher.deep_copy()

    def _matcher(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        try:
            with self._metrics.seconds.time():
                return read_grammar(self._tokenizer, text)
        except UnreadableGrammar as error:
            raise MalformedMessage("sampler.grammar", str(error)) from None

    def _read_tokenizer(self) -> LLTokenizer:
        folder = self._checkpoint.folder
        try:
            text = tokenizer_text(load_tokenizer(folder))
            if text is not None:
                end_token_ids = end_token_ids_of(self._checkpoint.generation_config())
                return grammar_tokenizer(text, self._checkpoint.vocab_size, end_token_ids)
        # The parser of a broken file may raise anything; the Rust tokenizers raise a plain Exception.
        except Exception as error:
            raise InternalError("a block server cannot read the model's tokenizer for grammars") from error
        raise InternalError("answers with a response format are not possible with the model's tokenizer")


def _deep_thread() -> ThreadPoolExecutor:
    """A thread with a large stack. No grammar of `MAX_GRAMMAR_BYTES` exhausts it; that would end the process."""
    pool = ThreadPoolExecutor(1, "grammars")
    with _starting:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            pool.submit(int)  # this starts the thread
        finally:
            threading.stack_size(usual)
    return pool
