"""Checks the ports that the user gives, finds free ports where none is given, and holds all of them."""

import errno
import random
import socket
import sys

from corolla.chassis.addresses import host_port
from corolla.chassis.errors import StartupError

# The range lies below the ports of outgoing connections, so that none of these takes a port before its server does.
_FIRST, _LAST = 20_000, 32_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Raises StartupError if the host is another machine, or the port is reserved."""
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as failure:
            if failure.errno == errno.EADDRINUSE:
                return False
            raise StartupError(f"cannot listen on {host_port(host, port)}: {failure.strerror}") from None
    return True


def listening_socket(host: str, port: int) -> socket.socket:
    """Listens on a port, and waits for a caller for at most a tenth of a second. Raises StartupError if it is taken."""
    made = _socket(host)
    try:
        made.bind((host, port))
        made.listen()
    except OSError as failure:
        made.close()
        raise StartupError(f"cannot listen on {host_port(host, port)}: {failure.strerror}") from None
    made.settimeout(0.1)
    return made


class Ports:
    """Hands out ports, each only once.

    A process begins to listen some time after it got its port. Until then, and while it is started again, another stack
    on this machine could take the port. So a socket that does not listen holds each port until `close`. Systems other
    than Linux do not let two sockets share a port in this way, so ports are not held there.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket | None] = {}

    def given(self, port: int, what: str, host: str = "127.0.0.1") -> int:
        """Takes the port that the user gives. Raises StartupError if the port is not free."""
        if port in self._held or not is_free(port, host):
            raise StartupError(f"port {port} for the {what} is taken; choose another one, or stop what listens there")
        self._held[port] = _hold(port, host, shares=True)
        return port

    def free(self, preferred: int | None = None, host: str = "127.0.0.1") -> int:
        """Takes the preferred port if it is free, otherwise any free port."""
        if preferred is not None and preferred not in self._held and is_free(preferred, host):
            return self.given(preferred, "", host)
        for port in random.sample(range(_FIRST, _LAST), 200):
            if port not in self._held and is_free(port, host):
                try:
                    self._held[port] = _hold(port, host, shares=False)
                except OSError:  # another stack holds it, or closed connections linger
                    continue
                return port
        raise StartupError("no free port was found")

    def choose(self, wanted: int | None, usual: int, what: str, host: str = "127.0.0.1") -> int:
        """Takes the port that the user gives; 0: any free one; None: the usual one if it is free, otherwise any."""
        if wanted is None:
            return self.free(usual, host)
        return self.given(wanted, what, host) if wanted else self.free(host=host)

    def close(self) -> None:
        """Releases all ports that are held."""
        for held in self._held.values():
            if held is not None:
                held.close()


def _hold(port: int, host: str, *, shares: bool) -> socket.socket | None:
    """Makes a socket that holds a port, and lets other sockets bind it, too.

    Args:
        shares: whether another socket that does not listen may have the port already; if false, such a socket makes
            this raise OSError.
    """
    if sys.platform != "linux":
        return None
    held = _socket(host, shares=shares)
    try:
        held.bind((host, port))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        held.close()
        raise
    return held


def _socket(host: str, *, shares: bool = True) -> socket.socket:
    """A socket of the host's family; one of IPv6 is of IPv4, too.

    Args:
        shares: whether the port may be one on which closed connections linger, or that another socket holds which does
            not listen. Servers set this option, too.
    """
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if shares:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
