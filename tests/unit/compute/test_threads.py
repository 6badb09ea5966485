"""Threads are added as long as they pay, and never beyond what the process may use."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from corolla.compute.threads import choose_num_threads, set_num_threads, single_threaded_pool


@pytest.mark.parametrize(
    "seconds, num_cores, chosen",
    [
        pytest.param({1: 1.0, 2: 2.0, 4: 0.1}, 4, 1, id="two are slower, so four are not tried"),
        pytest.param({1: 1.0, 2: 0.5, 4: 0.25, 8: 0.24}, 8, 4, id="eight gain nothing"),
        pytest.param({1: 1.0, 2: 0.9}, 2, 1, id="too small a gain"),
        pytest.param({1: 1.0, 2: 0.5}, 3, 2, id="no more than the cores"),
        pytest.param({1: 1.0}, 1, 1, id="one core"),
    ],
)
def test_doublings_must_pay(seconds: dict[int, float], num_cores: int, chosen: int) -> None:
    assert choose_num_threads(seconds.__getitem__, num_cores) == chosen


def test_a_configured_number_of_threads_is_not_measured() -> None:
    before = torch.get_num_threads()
    try:
        assert set_num_threads(1, lambda: pytest.fail("measured")) == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


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
