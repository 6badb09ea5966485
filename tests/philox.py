"""The random numbers of services, written out: the truth for drawn tokens, in integers of numpy.

A token's number follows from the answer's seed, the token's position in the answer and its id, by Philox4x32-10 (Salmon
et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3").
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

_WORD = np.uint64(0xFFFFFFFF)


def exponential_numbers(seed: int, position: int, width: int) -> Tensor:
    """The numbers of the tokens 0 to `width`, float32 `[width]`."""
    ids = np.arange(width, dtype=np.uint64)
    c0, c1, c2, c3 = np.full_like(ids, position), ids // np.uint64(2), np.zeros_like(ids), np.zeros_like(ids)
    k0, k1 = seed % 2**32, seed // 2**32 % 2**32
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = second >> np.uint64(32) ^ c1 ^ np.uint64(k0), second & _WORD
        c2, c3 = first >> np.uint64(32) ^ c3 ^ np.uint64(k1), first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    is_odd = ids % np.uint64(2) == 1
    high, low = np.where(is_odd, c2, c0), np.where(is_odd, c3, c1)
    even = ((high << np.uint64(20) | low >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52
    return torch.from_numpy(-np.log1p(-even)).float()


@contextmanager
def services_draws(*seeds: int) -> Iterator[None]:
    """Lets `torch.multinomial`, and so `generate` of transformers, draw as services do: row `i` with seed `i`."""
    position = 0

    def multinomial(probabilities: Tensor, num_samples: int = 1, **_options: Any) -> Tensor:
        nonlocal position
        assert (len(probabilities), num_samples) == (len(seeds), 1)
        numbers = [exponential_numbers(seed, position, probabilities.shape[1]) for seed in seeds]
        position += 1
        return (probabilities / torch.stack(numbers)).argmax(dim=-1, keepdim=True)

    with mock.patch.object(torch, "multinomial", multinomial):
        yield
