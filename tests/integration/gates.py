"""Block servers that wait for a test."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from corolla.block_server.runner import RowWork
from corolla.block_server.service import BlockServer
from tests.faulty_runner import FaultyRunner


@contextmanager
def held_up(server: BlockServer) -> Iterator[None]:
    """No answer through the server ends meanwhile, however long what the test does takes.

    The server waits only where it computes: it says that it lives, so nobody gives it up.
    """
    runner, may_go_on = server.engine.runner, threading.Event()

    def wait(rows: Sequence[RowWork]) -> None:
        may_go_on.wait(30)

    server.engine.runner = FaultyRunner(runner, before=wait)
    try:
        yield
    finally:
        server.engine.runner = runner
        may_go_on.set()
