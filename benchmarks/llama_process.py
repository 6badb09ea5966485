"""llama.cpp behind a pipe: run by any Python that has `llama_cpp`, which need not have Corolla.

    python llama_process.py MODEL.gguf THREADS

Reads JSON lines `{"prompt_ids": [...], "num_tokens": n}`, answers each with the seconds of its tokens since it began.
"""

import json
import sys
import time

from llama_cpp import Llama


def main(model: str, num_threads: int) -> None:
    llama = Llama(model, n_ctx=8192, n_threads=num_threads, n_threads_batch=num_threads, verbose=False)
    print("ready", flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        llama.reset()
        seconds: list[float] = []
        started_s = time.perf_counter()
        for _token in llama.generate(wanted["prompt_ids"], temp=0.0):
            seconds.append(time.perf_counter() - started_s)
            if len(seconds) == wanted["num_tokens"]:
                break
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
