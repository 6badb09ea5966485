"""The unsplit model of transformers in this process."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.timing import Timing
from corolla.models.checkpoint import Checkpoint, end_token_ids_of
from corolla.wire.tensors import DTYPES
from tests.run_folder import made_once
from tests.unpacked import unpack


def unsplit_folder(checkpoint: Checkpoint) -> Path:
    """Where others can read the whole model from: its own folder, or one that its GGUF file is unpacked to."""
    if checkpoint.gguf is None:
        return checkpoint.folder
    ends, path = end_token_ids_of(checkpoint.generation_config()), checkpoint.gguf.path
    return made_once(f"unpacked-{checkpoint.name}", lambda folder: unpack(path, folder, end_token_ids=ends))


class LocalModel:
    """Answers by its own `generate`, greedily and without end tokens."""

    def __init__(self, folder: Path, dtype: str = "float32", device: str = "cpu") -> None:
        library: Any = AutoModelForCausalLM
        self._model: Any = library.from_pretrained(folder, dtype=DTYPES[dtype]).to(device).eval()
        self._device = device

    def answer(self, prompt_ids: Sequence[int], num_tokens: int, num_threads: int = 1) -> Timing:
        stamps = _Stamps()
        started_s = time.perf_counter()
        self._generate([prompt_ids], num_tokens, num_threads, streamer=stamps)
        return Timing(started_s, tuple(stamps.seconds))

    def batch_s(self, prompts: Sequence[Sequence[int]], num_tokens: int, num_threads: int = 1) -> float:
        """Seconds for the answers to prompts of equal length as one batch."""
        started_s = time.perf_counter()
        self._generate(prompts, num_tokens, num_threads)
        return time.perf_counter() - started_s

    def batch_cpu_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds of processor time for the same, with one thread."""
        started_s = time.process_time()
        self._generate(prompts, num_tokens, 1)
        return time.process_time() - started_s

    def _generate(self, prompts: Sequence[Sequence[int]], num_tokens: int, num_threads: int, **options: Any) -> None:
        torch.set_num_threads(num_threads)
        ids = torch.tensor([list(each) for each in prompts], device=self._device)
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=num_tokens,
            max_new_tokens=num_tokens, pad_token_id=0, **options,
        )  # fmt: skip


class _Stamps(BaseStreamer):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self.seconds.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        pass
