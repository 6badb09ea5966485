"""Ports of this machine: given ones are checked, others are found."""

import errno
import random
import socket

from corolla.chassis.errors import StartupError

# Below what the system hands out to outgoing connections, one of which might take a port before its server does.
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Raises StartupError when the host is none of this machine, or the port is reserved."""
    with socket.socket() as probe:
        # As servers do it: a port whose connections of yesterday still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as failure:
            if failure.errno == errno.EADDRINUSE:
                return False
            raise StartupError(f"cannot listen on {host}:{port}: {failure.strerror}") from None
    return True


class Ports:
    """Hands out ports, none of them twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def given(self, port: int, what: str, host: str = "127.0.0.1") -> int:
        """The port asked for. Raises StartupError when it is taken."""
        if port in self._taken or not is_free(port, host):
            raise StartupError(f"port {port} for the {what} is taken; choose another one, or stop what listens there")
        self._taken.add(port)
        return port

    def free(self, preferred: int | None = None, host: str = "127.0.0.1") -> int:
        """The preferred port if it is free, else any free one."""
        candidates = [] if preferred is None else [preferred]
        candidates += random.sample(range(_FIRST, _LAST), 200)
        for port in candidates:
            if port not in self._taken and is_free(port, host):
                self._taken.add(port)
                return port
        raise StartupError("no free port was found")
