"""llama.cpp behind a pipe: run by any Python that has `llama_cpp`, which need not have Corolla.

    python llama_process.py MODEL.gguf THREADS

Reads JSON lines `{"prompt_ids": [...], "num_tokens": n}`, answers each with the seconds of its tokens since it began.
`{"prompts": [[...], ...], "num_tokens": n}` has several streams in one batch; a time is that of a token of each.
"""

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama

_MOST_STREAMS = 16
_MOST_TOKENS = 1 << 14


def main(model: str, num_threads: int) -> None:
    llama = Llama(model, n_ctx=8192, n_threads=num_threads, n_threads_batch=num_threads, verbose=False)
    streams = _Streams(llama, num_threads)
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        if "prompts" in wanted:
            print(json.dumps(streams.answer(wanted["prompts"], wanted["num_tokens"])), flush=True)
            continue
        llama.reset()
        seconds: list[float] = []
        started_s = time.perf_counter()
        for _token in llama.generate(wanted["prompt_ids"], temp=0.0):
            seconds.append(time.perf_counter() - started_s)
            if len(seconds) == wanted["num_tokens"]:
                break
        print(json.dumps(seconds), flush=True)


class _Streams:
    """A context of the same model for several sequences."""

    def __init__(self, llama: Llama, num_threads: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = _MOST_TOKENS
        parameters.n_seq_max = _MOST_STREAMS
        parameters.n_threads = parameters.n_threads_batch = num_threads
        self._context: Any = llama_cpp.llama_init_from_model(llama.model, parameters)
        self._batch: Any = llama_cpp.llama_batch_init(_MOST_TOKENS, 0, 1)
        self._vocab_size = llama.n_vocab()

    def answer(self, prompts: list[list[int]], num_tokens: int) -> list[float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        seconds: list[float] = []
        started_s = time.perf_counter()
        new, positions = prompts, [0] * len(prompts)
        for _ in range(num_tokens):
            token_ids = self._step(new, positions)
            positions = [position + len(ids) for position, ids in zip(positions, new, strict=True)]
            new = [[token_id] for token_id in token_ids]
            seconds.append(time.perf_counter() - started_s)
        return seconds

    def _step(self, new: list[list[int]], positions: list[int]) -> list[int]:
        """The most probable token after each sequence's new ones."""
        batch, last, index = self._batch, [], 0
        for sequence, (ids, position) in enumerate(zip(new, positions, strict=True)):
            for offset, token_id in enumerate(ids):
                batch.token[index], batch.pos[index] = token_id, position + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = offset == len(ids) - 1
                index += 1
            last.append(index - 1)
        batch.n_tokens = index
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp could not decode a batch")
        rows = [llama_cpp.llama_get_logits_ith(self._context, each) for each in last]
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in rows]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
