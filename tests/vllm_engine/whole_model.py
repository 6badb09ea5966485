"""A whole model by vLLM itself, in a process of its own: its `LLM` as it is installed, float32, on processors.

    python -m tests.vllm_engine.whole_model FOLDER QUESTIONS ANSWERS

Of greedy answers vLLM chooses the tokens; for all others Corolla's sampler does, from vLLM's logits, step by step.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vllm_engine.questions import Answer, Question

_ROOT: Final = Path(__file__).parents[2]
_SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_MOST_TOKENS: Final = 2048


def answers_by_vllm(model: Path, questions: Sequence[Question], folder: Path) -> list[Answer]:
    """What vLLM answers, all questions in one batch.

    Args:
        model: a folder that vLLM can read.
        folder: for what goes to and fro.

    Raises:
        RuntimeError: it ends otherwise; with the last it said.
    """
    asked, answered = folder / "questions.json", folder / "answers.safetensors"
    asked.write_text(json.dumps([asdict(each) for each in questions]), encoding="utf-8")
    command = [sys.executable, "-m", __name__, str(model), str(asked), str(answered)]
    environment = {**os.environ, **_SETTINGS, "VLLM_CACHE_ROOT": str(folder / "cache")}
    ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"vLLM does not answer:\n{ended.stderr[-4000:]}")
    tensors = load_file(answered)
    return [
        Answer(tensors[f"{number}.token_ids"].tolist(), tensors[f"{number}.logits"]) for number in range(len(questions))
    ]


class _Choice:
    """Of one answer's tokens, as vLLM asks for changes of logits: those given so far, and the next one's."""

    def __init__(self, question: Question) -> None:
        self.logits: list[Tensor] = []
        self._sampler = question.sampler() if question.sampling else None

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) != len(self.logits):
            raise RuntimeError(f"{len(self.logits)} steps gave {len(token_ids)} tokens")
        self.logits.append(logits.clone())
        if self._sampler is None:
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[self._sampler.sample(logits).token_id] = 0.0
        return only


def main(model: str, asked: str, answered: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

    questions = [Question(**each) for each in json.loads(Path(asked).read_text(encoding="utf-8"))]
    choices = [_Choice(question) for question in questions]

    class Chooser(AdapterLogitsProcessor):  # type: ignore[misc]
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> _Choice:
            number: int = params.extra_args["number"]
            return choices[number]

    # No prompt is cut: what is expected comes of as few pieces as can be.
    llm = LLM(
        model, dtype="float32", enforce_eager=True, enable_prefix_caching=False, max_model_len=_MOST_TOKENS,
        max_num_batched_tokens=max(_MOST_TOKENS, sum(len(each.prompt_ids) for each in questions)),
        max_num_seqs=len(questions), logits_processors=[Chooser], skip_tokenizer_init=True,
    )  # fmt: skip
    greedy = partial(SamplingParams, temperature=0.0, ignore_eos=True, detokenize=False)
    params = [
        greedy(max_tokens=each.num_tokens, extra_args={"number": number}) for number, each in enumerate(questions)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(each.prompt_ids)} for each in questions], params, use_tqdm=False)
    tensors = {}
    for number, (output, choice) in enumerate(zip(outputs, choices, strict=True)):
        tensors[f"{number}.token_ids"] = torch.tensor(output.outputs[0].token_ids)
        tensors[f"{number}.logits"] = torch.stack(choice.logits)
    save_file(tensors, answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
