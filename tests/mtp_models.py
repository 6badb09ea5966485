"""Tiny checkpoints with a multi-token prediction block, in the published layout, and transformers' own code for it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from corolla.models.loading import LOADING
from tests.checkpoints import HIDDEN_SIZE, VOCAB_SIZE, make_tiny_checkpoint

_INDEX = "model.safetensors.index.json"
_FILE = "mtp.safetensors"
_PARTS = ("enorm", "hnorm", "eh_proj", "post_norm")


def make_mtp_checkpoint(family: str, folder: Path, *, num_blocks: int = 4, seed: int = 0) -> Path:
    """Writes a tiny checkpoint with a random multi-token prediction block.

    The names are those of DeepSeek-V3 and GLM-4.5 on the hub: the block is one more layer, with copies of embedding and
    head in it.
    """
    make_tiny_checkpoint(family, folder, num_blocks=num_blocks + 1, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    changes = {"num_hidden_layers": num_blocks, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    generator = torch.Generator().manual_seed(seed + 1)

    def drawn(*shape: int) -> Tensor:
        spread, mean = (0.1, 1.0) if len(shape) == 1 else (1.6 * shape[-1] ** -0.5, 0.0)
        return torch.empty(shape).normal_(mean, spread, generator=generator)

    norm = (HIDDEN_SIZE,)
    write_parts(
        folder, num_blocks, {part: drawn(HIDDEN_SIZE, 2 * HIDDEN_SIZE) if part == "eh_proj" else drawn(*norm)
                             for part in _PARTS}
    )  # fmt: skip
    return folder


def make_trained_checkpoint(folder: Path, *, num_blocks: int = 4) -> tuple[Path, float, float]:
    """Writes a tiny checkpoint whose block has learnt, for a few seconds, what the model answers.

    Returns:
        The folder, and the share of tokens of unseen answers that the block predicts before and after the training.
    """
    torch.set_num_threads(1)
    make_mtp_checkpoint("deepseek_v3", folder, num_blocks=num_blocks)
    _weaken_blocks(folder, 0.02)
    whole = WholeMtp.of(folder)
    unseen = whole.texts(some_prompts(8, 12, seed=1), 48)
    before = whole.acceptance(unseen)
    parts = whole.train(whole.texts(some_prompts(40, 12, seed=2), 36))
    after = whole.acceptance(unseen)
    write_parts(folder, num_blocks, parts)
    return folder, before, after


def some_prompts(count: int, num_tokens: int, seed: int) -> Tensor:
    """Prompts of random tokens, int64 `[count, num_tokens]`."""
    return torch.randint(4, VOCAB_SIZE, (count, num_tokens), generator=torch.Generator().manual_seed(seed))


def _weaken_blocks(folder: Path, factor: float) -> None:
    """Weakens what blocks add, so that a token follows mostly from the one before it, and one layer can learn it."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if ".layers." in name and ("o_proj" in name or "down_proj" in name):
                tensor.mul_(factor)
        save_file(tensors, file, metadata={"format": "pt"})


def write_parts(folder: Path, num_blocks: int, parts: dict[str, Tensor]) -> None:
    """Writes what the block has around its decoder layer, by the names of transformers' `MtpLayer`."""
    prefix = f"model.layers.{num_blocks}."
    index = json.loads((folder / _INDEX).read_text())
    shards, ends = index["weight_map"], ("model.embed_tokens.weight", "lm_head.weight")
    held = {name: load_file(folder / shards[name])[name] for name in ends}
    assert len(held["lm_head.weight"]) == VOCAB_SIZE
    tensors = {f"{prefix}{part}.weight": tensor.detach().contiguous() for part, tensor in parts.items()}
    tensors[f"{prefix}shared_head.norm.weight"] = tensors.pop(f"{prefix}post_norm.weight")
    tensors[f"{prefix}shared_head.head.weight"] = held["lm_head.weight"]
    tensors[f"{prefix}embed_tokens.weight"] = held["model.embed_tokens.weight"]
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    shards |= dict.fromkeys(tensors, _FILE)
    (folder / _INDEX).write_text(json.dumps(index))


@dataclass(frozen=True, slots=True)
class WholeMtp:
    """The unsplit model and its block, by transformers' `MtpModel` (`modeling_layers.py`, 5.23), in float32."""

    model: Any
    mtp: Any

    @classmethod
    def of(cls, folder: Path) -> "WholeMtp":
        library: Any = AutoModelForCausalLM
        with LOADING:
            model = library.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
            # transformers knows the numbers of the published models' blocks only.
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
            mtp: Any = MtpModel.from_pretrained(model)
        return cls(model.requires_grad_(False), mtp.eval().requires_grad_(False))

    def texts(self, prompts: Tensor, num_tokens: int) -> Tensor:
        """Greedy answers to prompts, int64 `[B, T]`, with their prompts, `[B, T + num_tokens]`."""
        with torch.no_grad():
            found: Tensor = self.model.generate(
                prompts, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
                attention_mask=torch.ones_like(prompts),
            )  # fmt: skip
        return found

    def outputs(self, token_ids: Tensor) -> Tensor:
        """The outputs of the last block, behind the final norm, for int64 `[B, T]`: float32 `[B, T, H]`."""
        with torch.no_grad():
            hidden: Tensor = self.model(token_ids, output_hidden_states=True).hidden_states[-1]
        return hidden

    def predicted(self, token_ids: Tensor, outputs: Tensor) -> Tensor:
        """The block's hidden states for all tokens but the first, `[B, T - 1, H]`."""
        positions = torch.arange(1, token_ids.shape[1]).expand(len(token_ids), -1)
        cache = MtpCache(config=self.model.config.get_mtp_config())
        hidden: Tensor = self.mtp.forward_layer(0, outputs[:, :-1], positions, cache, input_ids=token_ids[:, 1:])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of the block's hidden states."""
        found: Tensor = self.mtp.shared_head(hidden)
        return found

    def acceptance(self, token_ids: Tensor) -> float:
        """The share of tokens of texts that the block predicts from two tokens before."""
        with torch.no_grad():
            found = self.logits(self.predicted(token_ids, self.outputs(token_ids))).argmax(-1)
        return float((found[:, :-1] == token_ids[:, 2:]).float().mean())

    def train(self, token_ids: Tensor, num_steps: int = 40) -> dict[str, Tensor]:
        """Trains what the block has around its layer on texts, and returns it; see `write_parts`."""
        (layer,) = self.mtp.layers
        parts = {part: getattr(layer, part).weight.requires_grad_(True) for part in _PARTS}
        optimizer = torch.optim.Adam(parts.values(), lr=1e-2)
        outputs = self.outputs(token_ids)
        for _ in range(num_steps):
            logits = self.logits(self.predicted(token_ids, outputs))[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 2:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return {part: weight.detach().requires_grad_(False) for part, weight in parts.items()}
