"""Which web pages may ask a service that asks nobody for a key. Pure.

A page of any host can make its reader's browser send requests to the reader's own machine. Browsers say whose page it
was; a name of the page's own that leads to this machine is the page's host and the request's at once.
"""

import ipaddress
from collections.abc import Mapping

from corolla.chassis.errors import InvalidRequest


class OwnPages:
    """Lets in requests of no page, and of pages of the service's own host.

    Args:
        host: where the service listens; empty: everywhere.
    """

    def __init__(self, host: str) -> None:
        self._is_loopback = _is_loopback(host)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises InvalidRequest."""
        origin, host = headers.get("origin"), headers.get("host", "").lower()
        if origin is None:
            return
        if origin.lower().partition("://")[2] != host or (self._is_loopback and not _is_loopback(_name(host))):
            raise InvalidRequest("origin", "pages of other hosts are not served where nobody is asked for a key")

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Of what pages read: browsers do not say whose page reads from its own host. Raises InvalidRequest."""
        self.check(headers)
        if self._is_loopback and not _is_loopback(_name(headers.get("host", "").lower())):
            raise InvalidRequest("host", "must be this machine's own where nobody is asked for a key")


def _name(host: str) -> str:
    """Without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
