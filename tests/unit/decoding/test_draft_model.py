"""What a draft model takes, and that it is the whole model, however its weights are stored."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from corolla.decoding.draft_model import DraftModel, DraftReading, num_weights
from corolla.models.checkpoint import Checkpoint
from tests.checkpoints import make_tiny_checkpoint
from tests.gguf_files import make_tiny_gguf
from tests.quantized_checkpoints import FORMATS, make_packed_checkpoint


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_counted_as_they_would_be_loaded(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family)
    library: Any = AutoModelForCausalLM
    expected = library.from_pretrained(folder, local_files_only=True).num_parameters()
    assert num_weights(Checkpoint.from_pretrained(str(folder))) == expected


def test_a_draft_model_may_be_a_gguf_file(tmp_path: Path) -> None:
    paths = make_tiny_gguf("llama", tmp_path)
    checkpoints = [Checkpoint.from_pretrained(str(path)) for path in paths]
    library: Any = AutoModelForCausalLM
    whole = library.from_pretrained(paths[0], dtype=torch.float32)
    expected = whole(torch.tensor([[5, 6, 7]]), logits_to_keep=1).logits[0, -1]
    for checkpoint in checkpoints:
        model = DraftModel.load(checkpoint, checkpoint, dtype=torch.float32, device="cpu")
        assert torch.equal(model.logits([5, 6, 7], DynamicCache()), expected)


@torch.inference_mode()
def test_a_packed_draft_model_is_expanded(tmp_path: Path) -> None:
    packed, expanded = make_packed_checkpoint("llama", tmp_path, FORMATS["awq"]())
    target = Checkpoint.from_pretrained(str(expanded))
    models = [
        DraftModel.load(Checkpoint.from_pretrained(str(folder)), target, dtype=torch.float32, device="cpu")
        for folder in (packed, expanded)
    ]
    own, expected = (model.logits([5, 90, 17, 33], DynamicCache()) for model in models)
    assert torch.equal(own, expected)


def test_caches_hold_no_more_tokens_than_there_is_room_for_and_give_room_back(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_pretrained(str(make_tiny_checkpoint("llama", tmp_path / "llama")))
    model = DraftModel.load(checkpoint, checkpoint, dtype=torch.float32, device="cpu")
    heads, size = checkpoint.config.num_key_value_heads, checkpoint.config.head_dim
    assert model.token_bytes() == checkpoint.num_blocks * 2 * heads * size * 4
    model.room.max_tokens = 20
    first, second = DraftReading(model), DraftReading(model)
    first.token_ids.extend(range(12))
    while first.read_chunk():
        pass
    assert first.num_tokens_left == 8
    for token_id in (11, 20, 21, 22):
        first.logits_after(token_id)
    assert model.room.num_free == 20 - 15
    second.token_ids.extend(range(5))
    assert (second.is_behind, second.num_tokens_left) == (False, 0), "a text without room gets no drafts"
    first.token_ids.append(99)
    first.forget_rejected_tokens()
    assert model.room.num_free == 20 - 12, "rejected draft tokens take no room"
    assert (second.is_behind, second.num_tokens_left) == (True, 3)
    del first
    assert model.room.num_free == 20
