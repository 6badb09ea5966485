"""A process has more threads for larger blocks, and never more than it may use cores."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from corolla.compute.threads import num_threads_for, single_threaded_pool


@pytest.mark.parametrize(
    "num_weights, num_cores, num_threads",
    [
        pytest.param(50_000, 8, 1, id="a tiny block"),
        pytest.param(3_540_000, 2, 2, id="the demo model"),
        pytest.param(3_540_000, 64, 4, id="no more than its weights occupy"),
        pytest.param(218_000_000, 6, 4, id="a power of two"),
        pytest.param(218_000_000, 1, 1, id="one core"),
    ],
)
def test_threads_follow_from_weights_and_cores(num_weights: int, num_cores: int, num_threads: int) -> None:
    assert num_threads_for(num_weights, num_cores) == num_threads


def test_a_pool_of_single_threads_leaves_other_threads_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with single_threaded_pool(3, "single") as pool, ThreadPoolExecutor(1) as other:
            assert {pool.submit(torch.get_num_threads).result() for _ in range(9)} == {1}
            assert torch.get_num_threads() == 2
            assert other.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)
