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
