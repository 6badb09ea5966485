"""The library with adapters: the same tokens as PEFT on the unsplit model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from corolla.chassis.errors import AdapterNotFound
from corolla.cli.app import main
from corolla.hf import AutoDistributedModelForCausalLM
from tests.adapters import make_adapter, unsplit_with
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.hf.models import draw_prompts
from tests.integration.hf.stacks import Stacks


def test_generate_answers_as_peft_does(tmp_path: Path, stacks: Stacks) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "tiny")
    adapters = {name: make_adapter(folder, tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))}
    stack = stacks.start(folder, ["0:2", "2:5"])
    for given, each in adapters.items():
        assert main(["adapters", "add", given, str(each), "--router", stack.router]) == 0
    prompt = draw_prompts(2, 30)
    lengths: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12}
    expected = {
        name: unsplit_with(folder, adapters.get(name or "")).model.generate(
            input_ids=prompt, do_sample=False, **lengths
        )
        for name in (None, *adapters)
    }
    assert len({str(each.tolist()) for each in expected.values()}) == 3
    where: dict[str, Any] = {"router": stack.router, "adapter": "one"}
    local = AutoDistributedModelForCausalLM.from_pretrained(str(folder), **where)
    remote = AutoDistributedModelForCausalLM.from_pretrained(str(folder), edges="remote", reuse_prefixes=True, **where)
    for model, settings in ((local, lengths), (remote, {"max_new_tokens": 12})):
        generate: Any = model.generate
        for name in ("one", "two", None, "one"):
            model.set_adapter(name)
            answered = generate(prompt, do_sample=False, **settings)
            assert answered.tolist() == expected[name].tolist()
        with pytest.raises(AdapterNotFound):
            model.set_adapter("three")
        assert torch.equal(generate(prompt, do_sample=False, **settings), expected["one"])
    stack.until_empty()
