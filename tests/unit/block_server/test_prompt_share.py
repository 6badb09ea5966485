"""How many prompt tokens an iteration takes while sessions decode."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.block_server.prompt_share import PromptShare

LONGEST_S, MOST = 0.05, 2048


def settled(base_s: float, token_s: float, *, noise: float = 0.0, num: int = 200) -> PromptShare:
    """The share after iterations that take all that it allows, between decode steps and short prompts."""
    share = PromptShare(LONGEST_S, MOST, 512)
    dice = random.Random(0)
    for _ in range(num):
        # Decode steps are much faster than the line of steps with prompts says.
        share.observe(0, base_s / 4)
        for num_tokens in (min(share.num_tokens, 20), share.num_tokens):
            share.observe(num_tokens, (base_s + token_s * num_tokens) * (1 + noise * dice.uniform(-1, 1)))
    return share


@given(st.floats(1e-4, 0.04), st.floats(1e-5, 1e-3))
def test_an_iteration_lasts_as_long_as_it_may(base_s: float, token_s: float) -> None:
    num_tokens = settled(base_s, token_s).num_tokens
    assert num_tokens in (16, MOST) or base_s + token_s * num_tokens == pytest.approx(LONGEST_S, abs=5e-4 + token_s)


@given(st.floats(1e-4, 0.04), st.floats(1e-5, 1e-3), st.integers(16, MOST))
def test_a_number_that_is_too_small_grows_and_never_passes_the_bound(base_s: float, token_s: float, first: int) -> None:
    share = PromptShare(LONGEST_S, MOST, first)
    seconds = base_s + token_s * first
    for _ in range(50):
        before, was_short = share.num_tokens, seconds <= LONGEST_S
        share.observe(before, seconds)
        seconds = base_s + token_s * share.num_tokens
        if was_short:
            assert share.num_tokens >= before
            # Tokens are whole ones.
            assert seconds <= LONGEST_S + token_s


@pytest.mark.parametrize(
    "base_s, token_s, expected",
    [
        # An 8B model whole on an H100: 36 ms for a step with few prompt tokens, 2,048 tokens in 73 ms.
        (0.036, 18e-6, 778),
        # A device on which even one token takes longer than the bound.
        (0.08, 1e-3, 16),
        # A model so small that tokens cost nothing.
        (0.002, 0.0, MOST),
    ],
)
def test_fast_and_slow_devices(base_s: float, token_s: float, expected: int) -> None:
    assert settled(base_s, token_s).num_tokens == pytest.approx(expected, rel=0.01)


def test_measurements_scatter() -> None:
    assert settled(0.008, 25e-6, noise=0.2).num_tokens == pytest.approx(1680, rel=0.2)


def test_a_load_that_changes_is_followed() -> None:
    share = PromptShare(LONGEST_S, MOST, 512)
    for token_s in (25e-6, 100e-6):
        for _ in range(30):
            share.observe(share.num_tokens, 0.008 + token_s * share.num_tokens)
    assert share.num_tokens == pytest.approx(420, rel=0.05)


def test_decode_steps_and_short_prompts_say_nothing() -> None:
    share = PromptShare(LONGEST_S, MOST, 512)
    for num_prompt_tokens in (0, 20):
        for _ in range(100):
            share.observe(num_prompt_tokens, 0.03)
    assert share.num_tokens == 512


def test_one_iteration_that_hung_is_forgotten() -> None:
    share = settled(0.008, 25e-6)
    usual = share.num_tokens
    share.observe(usual, 2.0)
    assert share.num_tokens >= usual // 2
    for _ in range(10):
        share.observe(share.num_tokens, 0.008 + 25e-6 * share.num_tokens)
    assert share.num_tokens == pytest.approx(usual, rel=0.05)
