"""What a draft model takes, before it is loaded."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from corolla.decoding.draft_model import num_weights
from corolla.models.checkpoint import Checkpoint
from tests.checkpoints import make_tiny_checkpoint


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_counted_as_they_would_be_loaded(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(family, tmp_path / family)
    library: Any = AutoModelForCausalLM
    expected = library.from_pretrained(folder, local_files_only=True).num_parameters()
    assert num_weights(Checkpoint.from_pretrained(str(folder))) == expected
