"""A random stream that jumps is where it would be if it had gone there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corolla.decoding.random_jump import moved_on

BLOCK = 624


def state_of(seed: int, num_outputs: int) -> bytes:
    """The state of a generator that has given so many outputs of 32 bits."""
    generator = torch.Generator().manual_seed(seed)
    if num_outputs:
        torch.empty(num_outputs, dtype=torch.int32).random_(generator=generator)
    return generator.get_state().numpy().tobytes()


@given(
    seed=st.integers(0, 2**63 - 1),
    num_before=st.integers(0, 3 * BLOCK),
    num_outputs=st.integers(1, 5 * BLOCK) | st.integers(1, 1_000_000),
)
def test_any_distance_from_any_place(seed: int, num_before: int, num_outputs: int) -> None:
    assert moved_on(state_of(seed, num_before), num_outputs) == state_of(seed, num_before + num_outputs)


@pytest.mark.parametrize("num_before", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("num_outputs", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_at_the_edges_of_blocks(num_before: int, num_outputs: int) -> None:
    assert moved_on(state_of(3, num_before), num_outputs) == state_of(3, num_before + num_outputs)
