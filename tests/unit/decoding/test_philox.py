"""Random numbers are those of Philox4x32-10, and exponentially distributed."""

import pytest
import torch

from corolla.decoding.race import even_numbers, exponential_numbers, exponential_of, philox
from tests import philox as reference

# `kat_vectors` of Random123 (https://github.com/DEShawResearch/random123) has them: counter, key and words.
PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1, 2**32, 2**63 + 12345, 2**64 - 1]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


def keys(seeds: list[int]) -> torch.Tensor:
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])


@pytest.mark.parametrize("counter, key, expected", PUBLISHED)
def test_words_are_the_published_ones(counter: str, key: str, expected: str) -> None:
    assert [int(word) for word in philox(words(counter), words(key))] == [int(word) for word in words(expected)]


def test_the_first_tokens_have_the_published_words() -> None:
    first, second = even_numbers(keys([0]), torch.tensor([0]), 2)[0].tolist()
    assert (first, second) == (0x6627E8D5E169C58D >> 12, 0xBC57AC4C9B00DBD8 >> 12)


@pytest.mark.parametrize("width", [1, 2, 97, 5000])
def test_numbers_follow_from_seed_position_and_id(width: int) -> None:
    positions = [0, 1, 2**20, 7, 131_071]
    found = exponential_numbers(keys(SEEDS), torch.tensor(positions), width)
    for row, seed, position in zip(found, SEEDS, positions, strict=True):
        assert torch.equal(row, reference.exponential_numbers(seed, position, width))


def test_numbers_of_a_token_do_not_depend_on_the_vocabulary() -> None:
    wide, narrow = (exponential_numbers(keys(SEEDS), torch.arange(len(SEEDS)), width) for width in (1000, 999))
    assert torch.equal(wide[:, :999], narrow)


def test_no_number_is_0_or_infinite_and_small_ones_have_all_their_bits() -> None:
    """A token of probability 1e-8 wins by numbers below 1e-8, which evenly drawn ones of 24 bits would not have."""
    ends = exponential_of(torch.tensor([0, (1 << 52) - 1]))
    assert ends.tolist() == pytest.approx([2.0**-53, 53 * 0.6931471805599453])
    small = torch.arange(1000)
    assert torch.equal(exponential_of(small), ((small.double() + 0.5) / 2**52).float())


def test_numbers_are_exponentially_distributed() -> None:
    found = exponential_numbers(keys([3, 4]), torch.tensor([5, 6]), 100_000).double()
    for numbers in (*found, found[:, ::2].flatten(), found[:, 1::2].flatten()):
        # Fifty parts of equal probability. One sample in ten thousand has a sum above 95.
        counts = torch.bincount((-torch.expm1(-numbers) * 50).long(), minlength=50).double()
        expected = len(numbers) / 50
        assert float(((counts - expected) ** 2 / expected).sum()) < 95
    assert abs(float(torch.corrcoef(found)[0, 1])) < 0.02
