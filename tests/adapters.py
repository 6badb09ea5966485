"""Makes adapters of tiny checkpoints by PEFT itself, and asks the unsplit model with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.reference import Unsplit


def make_adapter(checkpoint: Path, folder: Path, *, seed: int = 0, strength: float = 0.1, **config: Any) -> Path:
    """Writes a random adapter that changes a model's answers.

    Args:
        checkpoint: of the base model.
        folder: is created.
        strength: of the second factors, which PEFT would begin at zero.
        config: of LoraConfig; by default rank 4 on all linear layers.

    Returns:
        `folder`.
    """
    library: Any = AutoModelForCausalLM
    base = library.from_pretrained(checkpoint, dtype=torch.float32)
    facts = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
    model: Any = get_peft_model(base, LoraConfig(**facts))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            elif "lora_B" in name:
                parameter.normal_(0.0, strength, generator=generator)
    model.save_pretrained(folder)
    return folder


def unsplit_with(checkpoint: Path, adapter: Path | None) -> Unsplit:
    """The unsplit model with an adapter, as PEFT computes it; None: without one."""
    unsplit = Unsplit(checkpoint)
    if adapter is not None:
        unsplit.model = PeftModel.from_pretrained(unsplit.model, adapter).eval()
    return unsplit


class AdaptedModel:
    """The unsplit model with an adapter, as PEFT computes it."""

    def __init__(self, checkpoint: Path, adapter: Path | None) -> None:
        library: Any = AutoModelForCausalLM
        model = library.from_pretrained(checkpoint, dtype=torch.float32)
        self.model: Any = (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()

    @torch.inference_mode()
    def hidden_states(self, token_ids: Sequence[int]) -> tuple[Tensor, ...]:
        """Before block 0, and after each block but the last; then behind the final norm."""
        return tuple(
            state[0] for state in self.model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        )
