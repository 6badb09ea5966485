"""Checks the ports that the user gives, finds free ports where none is given, and holds all of them."""

import errno
import random
import socket
import sys
from contextlib import ExitStack, suppress
from typing import Final

from corolla.chassis.addresses import host_port
from corolla.chassis.errors import StartupError
from corolla.local.options import LOOPBACK

# The range lies below the ports of outgoing connections, so that none of these takes a port before its server does.
_FIRST, _LAST = 20_000, 32_000
_MAY_HOLD: Final = sys.platform == "linux"
_ALL_ADDRESSES: Final = ("0.0.0.0", "::")  # noqa: S104
_MOST_NAME_CHARS: Final = 100


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

    A process begins to listen some time after it got its port. Until then, and while it is started again, others could
    take the port. So a socket that does not listen holds each port until `close`, and a second one, of the port's
    name at its host among Unix sockets, keeps out other stacks of this machine: that name has one owner, however many
    sockets share a port. Systems other than Linux have neither, so ports are not held there.
    """

    def __init__(self) -> None:
        self._held: dict[int, ExitStack] = {}

    def given(self, port: int, what: str, host: str = "127.0.0.1") -> int:
        """Takes the port that the user gives. Raises StartupError if the port is not free."""
        if not self._takes(port, host):
            raise StartupError(f"port {port} for the {what} is taken; choose another one, or stop what listens there")
        return port

    def free(self, preferred: int | None = None, host: str = "127.0.0.1") -> int:
        """Takes the preferred port if it is free, otherwise any free port."""
        if preferred is not None and self._takes(preferred, host):
            return preferred
        for port in random.sample(range(_FIRST, _LAST), 200):
            if self._takes(port, host):
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
            held.close()

    def _takes(self, port: int, host: str) -> bool:
        """Takes a port, unless this stack or another one has it or something listens there."""
        if port in self._held:
            return False
        with ExitStack() as held, suppress(OSError):
            if _MAY_HOLD:
                # A name that begins with a zero ends with its process, and belongs to a network namespace as ports do.
                held.enter_context(socket.socket(socket.AF_UNIX)).bind(_name(port, host))
            if is_free(port, host):
                if _MAY_HOLD:
                    held.enter_context(_socket(host)).bind((host, port))
                self._held[port] = held.pop_all()
        return port in self._held


def _name(port: int, host: str) -> str:
    """The name of a port at a host. A port of all addresses has that of the loopback's, where most stacks listen."""
    return f"\0corolla-port-{port}-{LOOPBACK if host in _ALL_ADDRESSES else host}"[:_MOST_NAME_CHARS]


def _socket(host: str) -> socket.socket:
    """A socket of the host's family, which lets others bind its port, too; one of IPv6 is of IPv4, too."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
