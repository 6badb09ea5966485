"""A distributed and the unsplit model: both answer, and the answers are compared."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from corolla.hf import AutoDistributedModelForCausalLM
from corolla.hf.modeling import DistributedModelForCausalLM
from corolla.models.loading import LOADING
from tests.integration.hf.stacks import Stack


@dataclass(frozen=True)
class ModelPair:
    """One checkpoint twice."""

    remote: DistributedModelForCausalLM
    unsplit: Any
    stack: Stack

    @classmethod
    def load(cls, folder: Path, stack: Stack, *, served: str = "") -> "ModelPair":
        """The model of a folder; the block servers serve it as `served`, if not from there, too."""
        library: Any = AutoModelForCausalLM
        with LOADING:
            unsplit = library.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        remote = AutoDistributedModelForCausalLM.from_pretrained(served or str(folder), router=stack.router)
        return cls(remote, unsplit, stack)

    def both(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The answers of both, from the same seed."""
        torch.manual_seed(0)
        expected = self.unsplit.generate(*args, **kwargs)
        torch.manual_seed(0)
        return self.remote.generate(*args, **kwargs), expected

    def assert_equal(self, *args: Any, **kwargs: Any) -> Tensor:
        """That both answer with the same tokens. Returns them."""
        answered, expected = self.both(*args, **kwargs)
        assert answered.tolist() == expected.tolist()
        tokens: Tensor = answered
        return tokens


def draw_prompts(num_rows: int, num_tokens: int, seed: int = 0) -> Tensor:
    """int64 `[num_rows, num_tokens]`, no special tokens among them."""
    return torch.randint(4, 256, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def left_padding(num_tokens: int, *num_pads: int) -> Tensor:
    """The mask of a batch whose rows begin with so many pads."""
    mask = torch.ones(len(num_pads), num_tokens, dtype=torch.int64)
    for row, count in enumerate(num_pads):
        mask[row, :count] = 0
    return mask


class Listing(BaseStreamer):
    """Lists what it gets; may be interrupted."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.puts: list[list[int]] = []
        self.has_ended = False
        self._interrupted_at = interrupted_at

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())
        if len(self.puts) == self._interrupted_at:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.has_ended = True
