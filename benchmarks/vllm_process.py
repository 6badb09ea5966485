"""vLLM behind a pipe: run by any Python that has `vllm`, which need not have Corolla.

    python -P vllm_process.py MODEL_FOLDER DTYPE MOST_STREAMS

Reads JSON lines `{"prompts": [[...], ...], "num_tokens": n}`, answers each with the seconds that all answers took.
"""

import json
import os
import sys
import time


def main(model: str, dtype: str, most_streams: int) -> None:
    # Whatever is printed while it works is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype=dtype, enforce_eager=True, enable_prefix_caching=False, max_model_len=4096,
        max_num_seqs=most_streams,
    )  # fmt: skip
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=wanted["num_tokens"])
        prompts = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
        began_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.perf_counter() - began_s, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
