"""Tries a tokenizer's patterns on texts for which bad ones take very long, before any caller's text comes.

A regular expression such as `(a+)+b` tries each way to divide a text among its repetitions, before it says that there
is no match. Such patterns fail on a short text of the right character, repeated; those of real tokenizers take some
milliseconds. A process of its own tries them, since a running match cannot be ended.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from corolla.chassis.errors import CheckpointError
from corolla.client.text.worker_process import WorkerProcess, WorkLimitExceeded

_PARTS: Final = ("a", "A", "aA", "1", "a1", " ", "a ", "\n", " \n", "\t", "!", "! ", "'", "é", "中", "\u0301", "\u00a0")
_LENGTHS: Final = (64, 1000)
_ENDS: Final = ("", "\x01", "x")
_MOST_LITERALS: Final = 64
_SYNTAX: Final = frozenset("\\()[]{}|?*+^$.&pPsSdDwWbBnrtLNM")


def try_patterns(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises CheckpointError for a tokenizer whose normalizer or pre-tokenizer takes too long to split short texts."""
    backend = hf_tokenizer.backend_tokenizer
    parts = [
        part.__getstate__().decode() if part is not None else "null"
        for part in (backend.normalizer, backend.pre_tokenizer)
    ]
    if problem := _problem(*parts):
        raise CheckpointError(
            f"A pattern in the checkpoint's tokenizer.json takes too long on texts such as {problem!r}; it could stop "
            "the service. Take the tokenizer of the model's publisher."
        )


@functools.lru_cache(maxsize=16)
def _problem(normalizer: str, pre_tokenizer: str) -> str | None:
    """The beginning of a text that cannot be split in a second; None if there is no such text."""
    parts = json.loads(normalizer), json.loads(pre_tokenizer)
    patterns = [*_patterns(parts)]
    if not patterns:
        return None
    literals = sorted({char for pattern in patterns for char in pattern if char not in _SYNTAX and char.isprintable()})
    worker = WorkerProcess("corolla.client.text.pattern_worker", parts, "tries the tokenizer's patterns")
    try:
        for part in (*_PARTS, *(each for each in literals[:_MOST_LITERALS] if each not in _PARTS)):
            texts = [(part * length)[:length] + end for length in _LENGTHS for end in _ENDS]
            try:
                can_split = worker.ask(texts)
            except WorkLimitExceeded:
                can_split = False
            if not can_split:
                return texts[0][:8]
    finally:
        worker.close()
    return None


def _patterns(part: Any) -> Iterator[str]:
    """Yields the regular expressions of a part of a tokenizer."""
    if isinstance(part, dict):
        if isinstance(pattern := part.get("Regex"), str):
            yield pattern
        part = list(part.values())
    if isinstance(part, list | tuple):
        for each in part:
            yield from _patterns(each)
