"""A model whose weights are a GGUF file: every way to make it gives the unsplit model's tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corolla.hf import AutoDistributedModelForCausalLM, DistributedLlamaForCausalLM
from tests.gguf_files import make_tiny_gguf
from tests.integration.hf.models import ModelPair, draw_prompts
from tests.integration.hf.stacks import Stacks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> ModelPair:
    folder, file = make_tiny_gguf("llama", tmp_path_factory.mktemp("gguf"))
    return ModelPair.load(folder, stacks.start(file, ["0:2", "2:4"]), served=str(file))


@pytest.mark.parametrize(
    "make",
    [
        lambda file, _config, router: AutoDistributedModelForCausalLM.from_pretrained(file, router=router),
        lambda file, _config, router: AutoDistributedModelForCausalLM.from_pretrained(
            file, router=router, edges="remote"
        ),
        lambda _file, config, router: AutoDistributedModelForCausalLM.from_config(config, router=router),
        lambda _file, config, router: DistributedLlamaForCausalLM.from_config(config, router=router),
    ],
    ids=["from_pretrained", "remote edges", "from_config", "from_config of the family"],
)
def test_it_answers_as_the_unsplit_model(pair: ModelPair, make: Callable[[str, Any, str], Any]) -> None:
    config = pair.remote.config
    assert Path(str(config.name_or_path)).is_dir(), "there the tokenizer is"
    model = make(config.gguf_file, config, pair.stack.router)
    prompt = draw_prompts(1, 15)
    expected = pair.unsplit.generate(prompt, max_new_tokens=10, do_sample=False)
    assert model.generate(prompt, max_new_tokens=10, do_sample=False).tolist() == expected.tolist()
