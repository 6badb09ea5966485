"""The evaluation harness `lm-eval` over completions: `python lm_eval_package.py URL KEY FOLDER`.

FOLDER has `choices.json` and `texts.json`, the documents of two tasks, and gets `requests.json`: what the harness asked
and what it found, for a comparison with the unsplit model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

URL, KEY, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
os.environ.update(OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(FOLDER / "cache"))

import lm_eval  # noqa: E402


def task(name: str, file: str, **more: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(FOLDER / file)}},
        "test_split": "test",
        **more,
    }


CHOICES = task(
    "choices", "choices.json", output_type="multiple_choice", doc_to_text="{{question}}", doc_to_choice="{{choices}}",
    doc_to_target="{{label}}",
)  # fmt: skip
TEXTS = task("texts", "texts.json", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")

found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": "tiny", "base_url": f"{URL}/v1/completions", "auth_token": KEY, "max_length": 128, "num_concurrent": 2,
        "max_retries": 1,
    },
    tasks=[CHOICES, TEXTS],
    batch_size=3,
    log_samples=True,
    bootstrap_iters=0,
)  # fmt: skip
asked = {
    name: [{"arguments": each["arguments"], "found": each["filtered_resps"]} for each in samples]
    for name, samples in found["samples"].items()
}
facts = {"samples": asked, "results": found["results"]}
(FOLDER / "requests.json").write_text(json.dumps(facts, default=str))
