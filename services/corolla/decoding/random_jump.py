"""Moves a random stream of torch forward by any number of outputs; the time hardly depends on the number.

The generator is MT19937: its words follow a linear recurrence over GF(2), whose characteristic polynomial `p` has
degree 19937 (Matsumoto and Nishimura 1998). So the word `n` places further is the exclusive or of the words `i` places
further, for all powers `x^i` in `x^n mod p` (Haramoto and others 2008). Polynomials are integers, with a bit for each
power of `x`.
"""

import struct
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_NUM_WORDS: Final = 624
_MIDDLE: Final = 397
_MATRIX: Final = 0x9908B0DF
_UPPER: Final = np.uint32(0x80000000)
_LOWER: Final = np.uint32(0x7FFFFFFF)
_DEGREE: Final = 19937
_NUM_TERMS_AT_A_TIME: Final = 256

# The result of `torch.Generator.get_state` begins with the seed, the number of words left in the block, whether there
# was a seed, and the index of the next word; then the words follow, in 64 bits each.
_HEAD: Final = struct.Struct("<QiiQ")
_END: Final = _HEAD.size + 8 * _NUM_WORDS


def moved_on(state: bytes, num_outputs: int) -> bytes:
    """The state that a generator of torch has after `num_outputs` more outputs of 32 bits each."""
    words, num_used = words_of(state)
    num_used += num_outputs
    num_blocks = (num_used - 1) // _NUM_WORDS
    num_used -= num_blocks * _NUM_WORDS
    if num_blocks:
        # The first word that a seed fills does not follow the recurrence. All words of the next block do.
        words = _jumped(_continued(words, _NUM_WORDS)[_NUM_WORDS:], (num_blocks - 1) * _NUM_WORDS)
    return with_words(state, words, num_used)


def words_of(state: bytes) -> tuple[Words, int]:
    """The block of a generator's state, uint32 `[624]`, and how many of its words were used, from 1 to 624."""
    num_used: int = _HEAD.unpack_from(state)[3]
    # The generator computes a block when its first word is needed. The block that a seed fills gives no outputs.
    return np.frombuffer(state[_HEAD.size : _END], np.uint64).astype(np.uint32), num_used or _NUM_WORDS


def with_words(state: bytes, words: Words, num_used: int) -> bytes:
    """The state of a generator that has another block, of which `num_used` words were used, as `words_of` has them."""
    seed, _, is_seeded, _ = _HEAD.unpack_from(state)
    head = _HEAD.pack(seed, _NUM_WORDS + 1 - num_used, is_seeded, num_used)
    return head + words.astype(np.uint64).tobytes() + state[_END:]


def _jumped(words: Words, distance: int) -> Words:
    """The block that begins `distance` words after the block `words` begins."""
    terms = np.array([power for power, bit in enumerate(reversed(f"{_power_of_x(distance):b}")) if bit == "1"])
    windows = np.lib.stride_tricks.sliding_window_view(_continued(words, _DEGREE), _NUM_WORDS)
    jumped = np.zeros(_NUM_WORDS, np.uint32)
    for start in range(0, len(terms), _NUM_TERMS_AT_A_TIME):
        jumped ^= np.bitwise_xor.reduce(windows[terms[start : start + _NUM_TERMS_AT_A_TIME]], axis=0)
    return jumped


def _continued(words: Words, num_more: int) -> Words:
    """The block `words`, and the `num_more` words after it."""
    every = np.empty(_NUM_WORDS + num_more, np.uint32)
    every[:_NUM_WORDS] = words
    num_at_a_time = _NUM_WORDS - _MIDDLE
    for start in range(0, num_more, num_at_a_time):
        end = min(start + num_at_a_time, num_more)
        mixed = (every[start:end] & _UPPER) | (every[start + 1 : end + 1] & _LOWER)
        last_bits = (mixed & np.uint32(1)) * np.uint32(_MATRIX)
        every[_NUM_WORDS + start : _NUM_WORDS + end] = (
            every[_MIDDLE + start : _MIDDLE + end] ^ (mixed >> np.uint32(1)) ^ last_bits
        )
    return every


def _power_of_x(exponent: int) -> int:
    """`x^exponent mod p`."""
    power = 1
    for bit in f"{exponent:b}":
        power = _reduced(_squared(power) << int(bit))
    return power


def _squared(polynomial: int) -> int:
    """The square of a polynomial: over GF(2), the same coefficients with a zero between each two."""
    num_bytes = polynomial.bit_length() // 8 + 1
    bits = np.unpackbits(np.frombuffer(polynomial.to_bytes(num_bytes, "little"), np.uint8), bitorder="little")
    spread = np.zeros(2 * len(bits), np.uint8)
    spread[::2] = bits
    return int.from_bytes(np.packbits(spread, bitorder="little").tobytes(), "little")


def _reduced(polynomial: int) -> int:
    while high := polynomial >> _DEGREE:
        polynomial ^= high << _DEGREE
        for power in _lower_terms():
            polynomial ^= high << power
    return polynomial


@cache
def _lower_terms() -> tuple[int, ...]:
    """The powers of `x` in `p`, without the highest."""

    def times(polynomial: int, one: int, other: int) -> int:
        return polynomial << one ^ polynomial << other

    # MT19937 takes the lower 31 bits of a word of 32 bits; `_MATRIX` is the last row of its matrix.
    powers = [1]
    for _ in range(31):
        powers.append(times(powers[-1], _NUM_WORDS - 1, _MIDDLE - 1))
    p = times(powers[31], _NUM_WORDS, _MIDDLE) ^ (_MATRIX >> 31)
    for index in range(31):
        if _MATRIX >> index & 1:
            p ^= times(powers[30 - index], _NUM_WORDS, _MIDDLE)
    return tuple(power for power in range(_DEGREE) if p >> power & 1)
