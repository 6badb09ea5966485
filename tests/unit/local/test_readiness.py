"""A process is asked for its health in a thread of its own."""

import signal
import socket
from pathlib import Path
from types import FrameType

import grpc
import pytest

from corolla.cli.interruption import Interrupted
from corolla.local.readiness import Probe


def test_a_signal_ends_the_wait_for_a_process_that_is_silent_and_comes_to_no_code_of_grpc() -> None:
    interrupted: list[str] = []

    def interrupt(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            interrupted.append(frame.f_code.co_filename)
            frame = frame.f_back
        raise Interrupted

    with socket.create_server(("127.0.0.1", 0)) as silent:
        probe = Probe(f"127.0.0.1:{silent.getsockname()[1]}")
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(Interrupted):
                _ask_for_ever(probe)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        probe.close()
    library = str(Path(grpc.__file__).parent)
    assert interrupted
    assert not [each for each in interrupted if each.startswith(library)]


def _ask_for_ever(probe: Probe) -> None:
    while True:
        probe.is_serving()
