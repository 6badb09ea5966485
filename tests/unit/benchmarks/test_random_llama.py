"""Random checkpoints: transformers and Corolla read them, and packed layers stay packed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks import random_llama
from benchmarks.random_llama import read_bytes, stored_bytes, write_checkpoint
from corolla.models.checkpoint import Checkpoint
from corolla.models.span_model import load_span
from corolla.wire.span import Span


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_token_reads_all_but_an_embedding_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    shape = {**random_llama.SHAPES["tiny"], "tie_word_embeddings": is_tied}
    monkeypatch.setattr(random_llama, "SHAPES", {"tiny": shape})
    folder = tmp_path / "model"
    write_checkpoint(folder, "tiny", torch.float32, "cpu")
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(folder, dtype=torch.float32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    read = 4 * sum(each.numel() for each in model.parameters())
    embedding = 0 if is_tied else 4 * model.model.embed_tokens.weight.numel()
    # Files have headers, too.
    assert read - embedding < read_bytes(folder) < read - embedding + 20_000
    assert read < stored_bytes(folder) < read + 20_000


def test_linear_layers_in_four_bits_stay_packed_and_have_the_spread_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, "tiny", torch.bfloat16, "cpu", in_four_bits=True)
    checkpoint = Checkpoint.from_pretrained(str(folder))
    packed, expanded = (
        load_span(checkpoint, Span(1, 3), dtype=torch.bfloat16, quantization=each) for each in ("packed", "none")
    )
    kinds = [type(module).__name__ for module in packed.modules() if "Linear" in type(module).__name__]
    assert kinds == 2 * 7 * ["PackedLinear"]
    weights = [module.weight for module in expanded.modules() if type(module) is nn.Linear]
    assert len(weights) == len(kinds)
    assert all(float(weight.detach().float().std()) == pytest.approx(0.02, rel=0.1) for weight in weights)
