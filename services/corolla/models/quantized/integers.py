"""Unpacks numbers of few bits that are packed without gaps in words of 32 bits. All tensors are on one device."""

import torch
from torch import Tensor


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that words hold.

    Args:
        words: int32 `[..., W]`.
        bits: the bits of a number, 1 to 8. Number `i` is the bits `[i * bits, (i + 1) * bits)` of its row's words, the
            least significant first; a number may begin in one word and end in the next.
        count: how many numbers a row has; `count * bits <= 32 W`.

    Returns:
        uint8 `[..., count]`, each below `2 ** bits`.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)[..., :count]
    if 8 % bits == 0:
        octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        numbers = (octets >> shifts).bitwise_and_(2**bits - 1)
        return numbers.flatten(-2)[..., :count]
    first_bits = torch.arange(count, device=words.device) * bits
    word, shift = first_bits // 32, first_bits % 32
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    numbers = (unsigned[..., word] >> shift).bitwise_or_(unsigned[..., word + 1] << (32 - shift))
    return numbers.bitwise_and_(2**bits - 1).to(torch.uint8)


def num_words(count: int, bits: int) -> int:
    """How many words `count` numbers take."""
    return -(-count * bits // 32)
