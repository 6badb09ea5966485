"""How the supervisor describes the end of a process."""

import pytest

from corolla.local.fork_server import Exit


@pytest.mark.parametrize(
    "status, text", [(2, "ended with status 2"), (-9, "was killed by SIGKILL"), (-250, "was killed by signal 250")]
)
def test_the_end_of_a_process_is_put_into_words(status: int, text: str) -> None:
    assert Exit("server-1", 1, status).how == text
