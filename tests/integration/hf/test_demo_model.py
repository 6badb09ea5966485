"""The demo model: a real model's text, token for token. Tiny models decode in every way, in `test_generation`."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from corolla.models.checkpoint import Checkpoint
from corolla.models.demo import demo_checkpoint
from tests.integration.hf.models import ModelPair
from tests.integration.hf.stacks import Stacks
from tests.unpacked import unpacked_demo

pytestmark = [pytest.mark.model, pytest.mark.full]

LINES = (
    "The three largest cities of France are",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "My favourite season is autumn, because",
)


@pytest.fixture(scope="module")
def demo(stacks: Stacks) -> ModelPair:
    stack = stacks.start(demo_checkpoint(), ["0:15", "15:30"], kv_cache_mib=256)
    return ModelPair.load(unpacked_demo(), stack, served="demo")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    folder = Checkpoint.from_pretrained("demo").folder
    return AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)


def ids_of(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3, "do_sample": True, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 5}],
    ids=["beam sampling", "prompt lookup"],
)
def test_one_prompt(demo: ModelPair, tokenizer: Any, options: dict[str, Any]) -> None:
    demo.assert_equal(ids_of(tokenizer, LINES[0]), max_new_tokens=12, **options)


def test_a_padded_batch(demo: ModelPair, tokenizer: Any) -> None:
    batch = tokenizer(list(LINES), return_tensors="pt", padding=True)
    assert (batch.attention_mask == 0).any()
    demo.assert_equal(**batch, max_new_tokens=12)


def test_stop_strings(demo: ModelPair, tokenizer: Any) -> None:
    options: dict[str, Any] = {"stop_strings": [",", "."], "tokenizer": tokenizer, "max_new_tokens": 20}
    answer = demo.assert_equal(ids_of(tokenizer, LINES[0]), **options)
    assert tokenizer.decode(answer[0]).endswith((",", "."))


def test_a_chat_over_turns(demo: ModelPair, tokenizer: Any) -> None:
    text = torch.empty(1, 0, dtype=torch.int64)
    with demo.remote.inference_session() as session:
        for question in ("What is the capital of France?", "And of Italy?"):
            messages = [{"role": "user", "content": question}]
            turn = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
            text = demo.unsplit.generate(torch.cat([text, turn], dim=1), max_new_tokens=12)
            answer = demo.remote.generate(turn, max_new_tokens=12)
            assert answer.tolist() == text[:, -answer.shape[1] :].tolist()
        assert session.position == text.shape[1] - 1
