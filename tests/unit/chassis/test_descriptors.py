"""The limit of descriptors."""

import resource

from corolla.chassis.descriptors import most_connections_of_a_port, raise_limit


def test_the_soft_limit_is_raised_to_the_hard_one_and_a_port_takes_a_quarter() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 400, hard))
        assert most_connections_of_a_port() == (soft - 400) // 4
        raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        raise_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
