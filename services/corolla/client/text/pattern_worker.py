"""The program of the process that tries a tokenizer's patterns for `pattern_trial`."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from corolla.client.text.bounded_worker import serve

_MODEL: Final[dict[str, Any]] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
    "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": {}, "merges": [],
}  # fmt: skip


def begin(first: Sequence[Any]) -> Callable[[Sequence[str]], bool]:
    """Takes the normalizer and the pre-tokenizer; returns the function that says whether they can split texts."""
    # A pattern that gives up makes the library write its call stack.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    normalizer, pre_tokenizer = first
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": None}
    text = json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **parts, "model": _MODEL}
    )
    tokenizer = Tokenizer.from_str(text)

    def can_split(texts: Sequence[str]) -> bool:
        try:
            for each in texts:
                tokenizer.encode(each)
        except BaseException as failure:
            if type(failure).__name__ != "PanicException":  # a class that cannot be imported
                raise
            return False
        return True

    return can_split


if __name__ == "__main__":
    raise SystemExit(serve(begin))
