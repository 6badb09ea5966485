"""Answers one question about a GGUF file with llama.cpp: reads it as JSON from stdin, and writes JSON to stdout."""

import json
import sys
from typing import Any, Final

from llama_cpp import Llama

_FLOAT32: Final = 0
_CONTEXT: Final = 512


def main() -> None:
    question: dict[str, Any] = json.load(sys.stdin)
    if "texts" in question:
        llama = Llama(question["path"], vocab_only=True, verbose=False)
        found: Any = [llama.tokenize(text.encode(), special=True) for text in question["texts"]]
    else:
        # A context that the file names would make llama.cpp leave out nothing; keys and values stay in float32.
        llama = Llama(
            question["path"], n_ctx=_CONTEXT, type_k=_FLOAT32, type_v=_FLOAT32, flash_attn=False, n_threads=1,
            verbose=False,
        )  # fmt: skip
        tokens = llama.generate(question["prompt_ids"], top_k=1, temp=0.0, repeat_penalty=1.0)
        found = [token for token, _ in zip(tokens, range(question["num_tokens"]), strict=False)]
    json.dump(found, sys.stdout)


main()
