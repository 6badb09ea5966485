"""Speculation over remote blocks gives the tokens of plain decoding in fewer passes, and leaves nothing behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from corolla.hf import speculative
from corolla.hf.speculative import SPECULATIVE_CLASSES
from corolla.models.loading import LOADING
from tests.checkpoints import make_tiny_checkpoint
from tests.integration.hf.stacks import Stack, Stacks

PROMPT = torch.randint(4, 256, (1, 19), generator=torch.Generator().manual_seed(2))
FAMILIES = ("llama", "mistral", "bloom")


class Trio:
    """One checkpoint behind a stack, unsplit, and with drafts by the unsplit model."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        library: Any = AutoModelForCausalLM
        self.folder = folder
        self.stack = stack
        with LOADING:
            self.unsplit: Any = library.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        self.remote = self.with_drafts_by(self.unsplit)

    def with_drafts_by(self, small_model: PreTrainedModel) -> Any:
        model_class = SPECULATIVE_CLASSES[self.unsplit.config.model_type]
        return model_class.from_pretrained(str(self.folder), small_model=small_model, router=self.stack.router)


@pytest.fixture(scope="module", params=FAMILIES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> Trio:
    folder = make_tiny_checkpoint(request.param, tmp_path_factory.mktemp("drafts") / request.param)
    return Trio(folder, stacks.start(folder, ["0:2", "2:5"]))


@pytest.fixture(autouse=True)
def nothing_stays(trio: Trio) -> Iterator[None]:
    yield
    trio.stack.until_empty()


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.3}, {"eos_token_id": list(range(0, 320, 11))}, {"min_new_tokens": 20}],
    ids=["plain", "penalty", "end tokens", "least length"],
)
def test_greedy_answers_are_those_of_the_unsplit_model(trio: Trio, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 32, "do_sample": False, **options}
    expected = trio.unsplit.generate(PROMPT, **options)
    assert trio.remote.generate(PROMPT, **options).tolist() == expected.tolist()
    if trio.unsplit.config.model_type == "llama":
        small_model = AutoModelForCausalLM.from_config(trio.unsplit.config).eval()
        stranger = trio.with_drafts_by(small_model)
        for size in (1, 7):
            got = stranger.generate(PROMPT, speculative_inference_iteration_size=size, **options)
            assert got.tolist() == expected.tolist()


def test_a_session_goes_on_and_a_padded_row_is_one_row(trio: Trio) -> None:
    whole = trio.unsplit.generate(PROMPT, max_new_tokens=21, do_sample=False, eos_token_id=-1)
    with trio.remote.inference_session(max_length=60) as session:
        parts = [trio.remote.generate(PROMPT, max_new_tokens=8, do_sample=False, eos_token_id=-1)]
        # The last token has not been processed, and nothing of wrong draft tokens counts.
        assert session.position == parts[0].shape[1] - 1
        parts.append(trio.remote.generate(max_new_tokens=13, do_sample=False, eos_token_id=-1))
    assert torch.cat(parts, dim=1).tolist() == whole.tolist()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), PROMPT], dim=1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.int64), torch.ones_like(PROMPT)], dim=1)
    got = trio.remote.generate(padded, attention_mask=mask, max_new_tokens=21, do_sample=False, eos_token_id=-1)
    assert got[:, 4:].tolist() == whole.tolist()


def test_a_clone_needs_one_pass_for_eleven_tokens(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    num_columns: list[int] = []
    forward = type(trio.remote).forward

    def counted(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        num_columns.append(input_ids.shape[1])
        return forward(self, input_ids, **kwargs)

    monkeypatch.setattr(type(trio.remote), "forward", counted)
    answer = trio.remote.generate(PROMPT, max_new_tokens=33, do_sample=False, eos_token_id=-1)
    assert answer.shape[1] == PROMPT.shape[1] + 33
    assert num_columns == [PROMPT.shape[1] + 10, 11, 11]


def test_a_speculative_model_is_made_from_a_configuration_and_a_small_model(trio: Trio) -> None:
    config = AutoConfig.from_pretrained(trio.folder)
    family = trio.unsplit.config.model_type
    model = SPECULATIVE_CLASSES[family](config, trio.unsplit, router=trio.stack.router)
    assert getattr(speculative, type(model).__name__) is type(model)
    expected = trio.unsplit.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert model.generate(PROMPT, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()
    assert sum(each.numel() for each in model.parameters()) < sum(each.numel() for each in trio.unsplit.parameters())
    torch.manual_seed(3)
    assert model.generate(PROMPT, max_new_tokens=12, do_sample=True, temperature=0.7).shape == expected.shape


def test_a_small_model_of_another_vocabulary_is_refused(trio: Trio) -> None:
    config = AutoConfig.from_pretrained(trio.folder)
    config.vocab_size += 1
    small_model = AutoModelForCausalLM.from_config(config)
    small_model.config.name_or_path = ""
    with pytest.raises(ValueError, match="same tokenizer"):
        trio.with_drafts_by(small_model)
