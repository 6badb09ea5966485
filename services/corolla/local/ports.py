"""Ports of this machine: given ones are checked, others are found."""

import errno
import random
import socket
import sys

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
    """Hands out ports, none of them twice.

    A process listens a while after it got its port. Until then, and when it is started again, another stack of this
    machine could take it; so each is held by a socket that does not listen, as long as this object lives. Systems other
    than Linux do not let two sockets have a port in this way; there nothing is held.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket | None] = {}

    def given(self, port: int, what: str, host: str = "127.0.0.1") -> int:
        """The port asked for. Raises StartupError when it is taken."""
        if port in self._held or not is_free(port, host):
            raise StartupError(f"port {port} for the {what} is taken; choose another one, or stop what listens there")
        self._held[port] = _hold(port, host, shares=True)
        return port

    def free(self, preferred: int | None = None, host: str = "127.0.0.1") -> int:
        """The preferred port if it is free, else any free one."""
        if preferred is not None and preferred not in self._held and is_free(preferred, host):
            return self.given(preferred, "", host)
        for port in random.sample(range(_FIRST, _LAST), 200):
            if port not in self._held and is_free(port, host):
                try:
                    self._held[port] = _hold(port, host, shares=False)
                except OSError:  # another one holds it, or connections of yesterday linger
                    continue
                return port
        raise StartupError("no free port was found")

    def close(self) -> None:
        """Lets go of them."""
        for held in self._held.values():
            if held is not None:
                held.close()


def _hold(port: int, host: str, *, shares: bool) -> socket.socket | None:
    """A socket with which others may have the port, too, from now on.

    Args:
        shares: whether somebody may have it already who does not listen; else that raises OSError.
    """
    if sys.platform != "linux":
        return None
    held = socket.socket()
    try:
        if not shares:
            held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
