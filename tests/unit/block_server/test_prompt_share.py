"""How many prompt tokens an iteration takes while sessions decode."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.prompt_share import PromptShare


def observed(base_s: float, token_s: float, *, noise: float = 0.0, num: int = 200, longest_s: float = 0.05) -> int:
    share = PromptShare(longest_s, 2048, 1024)
    dice = random.Random(0)
    for _ in range(num):
        num_tokens = dice.choice((1, 8, 64, 256, 1024))
        share.observe(num_tokens, (base_s + token_s * num_tokens) * (1 + noise * dice.uniform(-1, 1)))
    return share.num_tokens


@given(st.floats(1e-4, 0.04), st.floats(1e-5, 1e-3))
def test_an_iteration_lasts_as_long_as_it_may(base_s: float, token_s: float) -> None:
    num_tokens = observed(base_s, token_s)
    assert num_tokens in (16, 2048) or base_s + token_s * num_tokens == pytest.approx(0.05, abs=2 * token_s)


@pytest.mark.parametrize(
    "base_s, token_s, expected",
    [
        # An 8B model whole on an H100, as docs/gpu.md has it: 8 ms for a step, 2,048 tokens in 59 ms.
        (0.008, 25e-6, 1680),
        # A device on which even one token takes longer than the bound.
        (0.08, 1e-3, 16),
        # A model so small that tokens cost nothing.
        (0.002, 0.0, 2048),
    ],
)
def test_fast_and_slow_devices(base_s: float, token_s: float, expected: int) -> None:
    assert observed(base_s, token_s) == pytest.approx(expected, rel=0.01)


def test_measurements_scatter() -> None:
    assert observed(0.008, 25e-6, noise=0.2) == pytest.approx(1680, rel=0.2)


def test_a_load_that_changes_is_followed() -> None:
    share = PromptShare(0.05, 2048, 1024)
    for token_s in (25e-6, 100e-6):
        for _ in range(200):
            for num_tokens in (1, 512):
                share.observe(num_tokens, 0.008 + token_s * num_tokens)
    assert share.num_tokens == pytest.approx(420, rel=0.05)


def test_iterations_of_one_size_say_nothing_about_others() -> None:
    share = PromptShare(0.05, 2048, 1024)
    assert share.num_tokens == 1024
    for _ in range(100):
        share.observe(8, 0.01)
    assert share.num_tokens == 1024
