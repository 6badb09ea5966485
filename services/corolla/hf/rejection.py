"""Rejection sampling, which turns draft tokens from one distribution into exact samples of another one.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.:
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

import torch
from torch import Tensor


def checked_draft_token(
    target: Tensor, draft: Tensor, draft_token: int, generator: torch.Generator | None = None
) -> int:
    """Chooses the next token, the draft token or another one, so that it is distributed as `target`.

    A draft token `x` is accepted with the probability `min(1, target[x] / draft[x])`. Otherwise another token is drawn
    where `target` exceeds `draft`, in proportion to the excess.

    Args:
        target: float32 `[V]`, probabilities, on any device.
        draft: float32 `[V]`, on the same device: the probabilities by which `draft_token` was drawn.
        generator: the random stream; None takes torch's own.
    """
    chance = torch.rand((), generator=generator, device=target.device)
    if chance * draft[draft_token] < target[draft_token]:
        return draft_token
    surplus = (target - draft).clamp_(min=0)
    # Equal distributions have no surplus, apart from rounding; then the draft token is accepted.
    if surplus.sum() <= 0:
        return draft_token
    return int(torch.multinomial(surplus, num_samples=1, generator=generator))
