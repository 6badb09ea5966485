"""Trained prompts as a caller gives them, checked, and as they travel."""

import torch
from torch import Tensor

from corolla.hf.places import RemoteBlockRun


def require_prompts(prompts: object, blocks: RemoteBlockRun) -> None:
    """Checks embeddings that stand before a text: `[P, H]`.

    Raises:
        ValueError: another shape, or numbers that are not finite.
    """
    if not isinstance(prompts, Tensor) or prompts.dim() != 2 or prompts.shape[1] != blocks.hidden_size:
        raise ValueError(f"`prompts` must be a tensor of the shape [tokens, {blocks.hidden_size}].")
    _require_finite("prompts", prompts, blocks.dtype)


def prompts_by_sequence(block_prompts: object, blocks: RemoteBlockRun) -> list[Tensor]:
    """For each sequence `[blocks, P, H]`, contiguous on the CPU in the dtype of the blocks; one stands for all.

    Args:
        block_prompts: `[blocks, P, H]` or `[blocks, B, P, H]`; a copy is taken.

    Raises:
        ValueError: another shape, or numbers that are not finite.
    """
    num_blocks, width = len(blocks.span), blocks.hidden_size
    expected = (
        f"must be a tensor of the shape [{num_blocks}, tokens, {width}] or [{num_blocks}, batch, tokens, {width}]"
    )
    if not isinstance(block_prompts, Tensor):
        raise ValueError(f"`block_prompts` {expected}.")
    shape = tuple(block_prompts.shape)
    if len(shape) not in (3, 4) or 0 in shape or shape[0] != num_blocks or shape[-1] != width:
        raise ValueError(f"`block_prompts` {expected}, not {list(shape)}.")
    if shape[-2] > blocks.context_length:
        raise ValueError(f"`block_prompts` are for more positions than the model's {blocks.context_length}.")
    values = _require_finite("block_prompts", block_prompts, blocks.dtype)
    by_sequence = values[:, None] if values.dim() == 3 else values
    return [part.clone(memory_format=torch.contiguous_format) for part in by_sequence.unbind(1)]


def _require_finite(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values on the CPU in the dtype that the blocks compute in."""
    converted = values.detach().to(device="cpu", dtype=dtype)
    if not converted.isfinite().all():
        raise ValueError(f"`{name}` must be finite in {dtype}.")
    return converted
