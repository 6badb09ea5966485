"""Prompts are cut finely enough for all hops to work at once, and no finer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corolla.chain.reservations import ChainLimits
from corolla.chain.step_window import MIN_CHUNK_TOKENS, chunk_tokens, whole_units


@pytest.mark.parametrize(
    "num_tokens, num_hops, expected",
    [
        pytest.param(4096, 1, 256, id="one hop works alone"),
        pytest.param(10, 2, 64, id="a short prompt is one chunk"),
        pytest.param(512, 2, 64, id="eight chunks on two hops"),
        pytest.param(1024, 2, 128, id="larger ones for a longer prompt"),
        pytest.param(100_000, 2, 256, id="no larger than allowed"),
        pytest.param(1024, 4, 64, id="more chunks for more hops"),
    ],
)
def test_chunks_grow_with_the_prompt(num_tokens: int, num_hops: int, expected: int) -> None:
    assert chunk_tokens(num_tokens, num_hops, 256) == expected


@given(num_tokens=st.integers(1, 10_000), num_hops=st.integers(1, 8), max_tokens=st.integers(1, 512))
def test_hops_idle_for_a_fifth_at_most_unless_chunks_would_be_too_small(
    num_tokens: int, num_hops: int, max_tokens: int
) -> None:
    size = chunk_tokens(num_tokens, num_hops, max_tokens)
    assert 1 <= size <= max_tokens
    num_chunks = -(-num_tokens // size)
    share_idle = (num_hops - 1) / (num_chunks + num_hops - 1)
    assert share_idle <= 0.25 or size <= MIN_CHUNK_TOKENS


@given(
    position=st.integers(0, 10_000),
    num_tokens=st.integers(1, 10_000),
    size=st.integers(1, 512),
    unit=st.sampled_from([0, 16, MIN_CHUNK_TOKENS]),
)
def test_the_last_chunk_begins_at_the_last_end_of_a_unit(position: int, num_tokens: int, size: int, unit: int) -> None:
    begins, end = position, position + num_tokens
    while end - begins > size:
        begins += whole_units(begins, size, unit, is_last=False)
    last = whole_units(begins, end - begins, unit, is_last=True)
    assert 0 < last <= end - begins
    begins += last if begins + last < end else 0
    assert whole_units(begins, end - begins, unit, is_last=True) == end - begins
    assert not unit or begins >= (end - 1) // unit * unit or size < unit


@pytest.mark.parametrize(
    "prefill_chunk_tokens, max_step_tokens, alone, during_decode",
    [(0, 512, 256, 64), (0, 2048, 1024, 256), (0, 1, 1, 1), (24, 512, 24, 6), (4096, 512, 512, 128)],
)
def test_chunks_follow_what_the_servers_take(
    prefill_chunk_tokens: int, max_step_tokens: int, alone: int, during_decode: int
) -> None:
    limits = ChainLimits(prefill_chunk_tokens, step_timeout_s=1.0, lease_ms=1)
    assert limits.chunk_tokens(max_step_tokens) == alone
    assert limits.chunk_tokens(max_step_tokens, during_decode=True) == during_decode
