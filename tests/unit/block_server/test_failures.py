import pytest

from corolla.block_server.engine import Failures


def test_three_failures_in_a_row_end_the_server_once() -> None:
    ends: list[bool] = []
    failures = Failures(lambda: ends.append(True))
    for _ in range(2):
        failures.failed()
    failures.succeeded()
    for _ in range(2):
        failures.failed()
    assert ends == []
    failures.failed()
    failures.failed()
    assert ends == [True]


@pytest.mark.parametrize(
    "seen, num_ends",
    [
        pytest.param([1] * 4, 1, id="hangs"),
        pytest.param([1] * 9, 1, id="ends once"),
        pytest.param([1, 1, 1, 2, 2, 2, 3], 0, id="other work each time"),
        pytest.param([0] * 9, 0, id="idle"),
        pytest.param([1, 1, 1, 0, 2], 0, id="comes to its end"),
    ],
)
def test_work_that_does_not_end_ends_the_server(seen: list[int], num_ends: int) -> None:
    ends: list[bool] = []
    failures = Failures(lambda: ends.append(True))
    for current in seen:
        failures.looked(current, 3)
    assert len(ends) == num_ends


def test_without_a_bound_a_step_may_take_any_time() -> None:
    failures = Failures(lambda: pytest.fail("it ended"))
    for _ in range(1000):
        failures.looked(1, 0)
