"""Sampling from one distribution by guesses from another, so that nobody can tell from the result.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.:
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
"""

import torch
from torch import Tensor


def checked_guess(target: Tensor, draft: Tensor, guess: int, generator: torch.Generator | None = None) -> int:
    """The next token: the guess, or another one; distributed as `target` in either case.

    A guess `x` stays with the probability `min(1, target[x] / draft[x])`. Otherwise the token is drawn from what
    `target` has more than `draft`; so it differs from the guess.

    Args:
        target: float32 `[V]`, probabilities.
        draft: float32 `[V]`, the probabilities by which `guess` was drawn.
        generator: None is torch's own random stream.
    """
    chance = torch.rand((), generator=generator, device=target.device)
    if chance * draft[guess] < target[guess]:
        return guess
    surplus = (target - draft).clamp_(min=0)
    # Equal distributions leave nothing, save for rounding; then the guess is as good as any.
    if surplus.sum() <= 0:
        return guess
    return int(torch.multinomial(surplus, num_samples=1, generator=generator))
