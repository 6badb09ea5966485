"""Answers one question about a GGUF file with llama.cpp: reads it as JSON from stdin, and writes JSON to stdout."""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, Final

import llama_cpp
from llama_cpp import Llama

_FLOAT32: Final = 0
_CONTEXT: Final = 512


def main() -> None:
    question: dict[str, Any] = json.load(sys.stdin)
    if "kind" in question:
        library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so*"))))
        raw, numbers = Path(question["path"]).read_bytes(), (ctypes.c_float * question["count"])()
        # The names of the types in code are in lower case, but for this ending.
        expand = getattr(library, f"dequantize_row_{question['kind'].lower().replace('_k', '_K')}")
        expand(raw, numbers, ctypes.c_int64(question["count"]))
        found: Any = list(numbers)
    elif "texts" in question:
        llama = Llama(question["path"], vocab_only=True, verbose=False)
        found = [llama.tokenize(text.encode(), special=True) for text in question["texts"]]
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
