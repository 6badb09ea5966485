"""The examples of docs/library.md run as they stand there, one after the other."""

import re
from typing import Any

import pytest

from corolla.models.demo import demo_checkpoint
from tests.architecture.sources import ROOT
from tests.examples import addressed
from tests.integration.hf.stacks import Stacks

pytestmark = pytest.mark.model

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text("utf-8"), re.DOTALL | re.M)


@pytest.mark.full
def test_the_examples_run(stacks: Stacks) -> None:
    stack = stacks.start(demo_checkpoint(), ["0:15", "15:30"], kv_cache_mib=64, num_clients=1)
    names: dict[str, Any] = {}
    for number, example in enumerate(EXAMPLES):
        text = addressed(example, {"router": stack.router, "client": stack.clients[0]})
        exec(compile(text, f"docs/library.md, example {number + 1}", "exec"), names)  # noqa: S102
        if number == 0:
            assert names["text"].startswith("The capital of France is Paris")
    assert len(EXAMPLES) == 11
    assert names["sampled"].shape[1] <= names["prompt"].input_ids.shape[1] + 8
    assert names["beams"].shape[0] == names["answers"].shape[0] == 2
    assert names["looked_up"].tolist()[0][:5] == names["prompt"].input_ids.tolist()[0]
    assert names["processed"] == names["first"].shape[1] + names["more"].shape[1] - 1
    assert names["same"].sub(names["whole"]).abs().max() < 1e-3
    assert names["logits"].argmax(-1)[-1] == names["model"](**names["prompt"], use_cache=False).logits[0, -1].argmax()
    expected = names["model"].generate(**names["prompt"], max_new_tokens=8)
    assert names["speculated"].tolist() == expected.tolist()
    assert 0 < names["accepted"] <= names["drafted"]
    assert names["rollouts"].shape[1] <= 24
    assert names["newest"].shape == (2, 12)
    assert names["tuned"].shape[1] == names["prompt"].input_ids.shape[1] + 8
    names.clear()
    stack.until_empty()
