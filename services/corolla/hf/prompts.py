"""Trained prompts as a caller gives them, checked and as they travel."""

from torch import Tensor

from corolla.hf.places import RemoteBlockRun


def prompts_by_sequence(block_prompts: Tensor, blocks: RemoteBlockRun) -> list[Tensor]:
    """For each sequence `[blocks, P, H]`, contiguous on the CPU in the dtype of the blocks; one stands for all.

    Args:
        block_prompts: `[blocks, P, H]` or `[blocks, B, P, H]`; a copy is taken.

    Raises:
        ValueError: another shape, or numbers that are not finite.
    """
    num_blocks, width = len(blocks.span), blocks.hidden_size
    shape = tuple(block_prompts.shape)
    if len(shape) not in (3, 4) or 0 in shape or shape[0] != num_blocks or shape[-1] != width:
        raise ValueError(
            f"`block_prompts` must have the shape [{num_blocks}, tokens, {width}] or [{num_blocks}, batch, tokens, "
            f"{width}], not {list(shape)}."
        )
    if shape[-2] > blocks.context_length:
        raise ValueError(f"`block_prompts` are for more positions than the model's {blocks.context_length}.")
    values = block_prompts.detach().to(device="cpu", dtype=blocks.dtype)
    if not values.isfinite().all():
        raise ValueError(f"`block_prompts` must be finite in {blocks.dtype}.")
    by_sequence = values[:, None] if values.dim() == 3 else values
    return [part.contiguous().clone() for part in by_sequence.movedim(1, 0)]
