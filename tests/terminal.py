"""A pseudo-terminal for tests of what people type at."""

import os
import pty
import select
import signal
import time

import pytest


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, command: list[str]) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execv(command[0], command)
        self.shown = ""
        self._is_closed = False

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Fails unless the text appears after what was waited for last."""
        give_up = time.monotonic() + timeout_s
        poll = select.poll()  # `select` knows the first 1024 descriptors only
        poll.register(self._fd, select.POLLIN)
        while text not in self.shown:
            if time.monotonic() > give_up:
                pytest.fail(f"{text!r} did not appear in {self.shown!r}")
            if poll.poll(200):
                try:
                    self.shown += os.read(self._fd, 4096).decode()
                except OSError:
                    pytest.fail(f"the command ended before {text!r} appeared in {self.shown!r}")
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> int:
        """Returns the exit status."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        self._is_closed = True
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """After a test that failed half-way."""
        if not self._is_closed:
            os.kill(self._pid, signal.SIGKILL)
            self.close()
