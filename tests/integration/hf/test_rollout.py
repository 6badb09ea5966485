"""Rollouts over remote blocks are those of the unsplit model, and leave nothing behind."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from corolla.hf import AutoDistributedModelForCausalLM, rollout
from corolla.models.loading import LOADING
from tests.checkpoints import make_tiny_checkpoint, make_tokenizer
from tests.integration.hf.stacks import Stacks


def test_rollouts_of_a_batch(tmp_path: Path, stacks: Stacks) -> None:
    folder = make_tiny_checkpoint("llama", tmp_path / "llama")
    stack = stacks.start(folder, ["0:2", "2:5"])
    library: Any = AutoModelForCausalLM
    with LOADING:
        unsplit = library.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    remote = AutoDistributedModelForCausalLM.from_pretrained(str(folder), router=stack.router)
    tokenizer: Any = make_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.bos_token
    prompts = torch.randint(4, 256, (3, 11), generator=torch.Generator().manual_seed(4))
    prompts[1, :4], prompts[2, :10] = tokenizer.pad_token_id, tokenizer.pad_token_id

    free = rollout.generate(unsplit, prompts, tokenizer, 27, do_sample=False)
    stops = [free[0, 14:16].tolist(), free[2, 18:20].tolist()]
    cases: list[dict[str, Any]] = [
        {"do_sample": False, "stop_token_ids": stops},
        {"temperature": 0.8, "top_k": 50, "stop_token_ids": stops},
        {"num_beams": 3, "do_sample": False},
    ]
    for options in cases:
        torch.manual_seed(1)
        expected = rollout.generate(unsplit, prompts, tokenizer, 27, **options)
        torch.manual_seed(1)
        assert rollout.generate(remote, prompts, tokenizer, 27, **options).tolist() == expected.tolist()
    stack.until_empty()

    parts = rollout.generate_streaming(remote, prompts, tokenizer, 27, do_sample=False, stream_interval=4)
    assert next(parts).tolist() == free[:, :15].tolist()
    # A stream that is left frees what it holds.
    del parts
    stack.until_empty()
