"""Sampling from one distribution by draft tokens from another, so that nobody can tell from the result.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.:
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

import torch
from torch import Tensor


def checked_draft_token(
    target: Tensor, draft: Tensor, draft_token: int, generator: torch.Generator | None = None
) -> int:
    """The next token: the draft token, or another one; distributed as `target` in either case.

    A draft token `x` stays with the probability `min(1, target[x] / draft[x])`. Otherwise the token is drawn from what
    `target` has more than `draft`; so it differs from the draft token.

    Args:
        target: float32 `[V]`, probabilities.
        draft: float32 `[V]`, the probabilities by which `draft_token` was drawn.
        generator: None is torch's own random stream.
    """
    chance = torch.rand((), generator=generator, device=target.device)
    if chance * draft[draft_token] < target[draft_token]:
        return draft_token
    surplus = (target - draft).clamp_(min=0)
    # Equal distributions leave nothing, save for rounding; then the draft token is as good as any.
    if surplus.sum() <= 0:
        return draft_token
    return int(torch.multinomial(surplus, num_samples=1, generator=generator))
