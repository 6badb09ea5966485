"""Decides which web pages may send requests to a service without keys. Pure.

A page of any host can make the browser send requests to the user's own machine. Browsers name the page's host in
`origin`. But an attacker's host name may resolve to this machine (DNS rebinding); then page and request have the same
host. So a service on a loopback address accepts only pages whose host is a loopback name.
"""

import ipaddress
from collections.abc import Mapping

from corolla.chassis.errors import InvalidRequest


class OwnPages:
    """Accepts requests that come from no page, or from pages of the service's own host.

    Args:
        host: the address that the service listens on; empty: all.
    """

    def __init__(self, host: str) -> None:
        self._is_loopback = _is_loopback(host)

    def check(self, headers: Mapping[str, str]) -> None:
        """Checks a request's headers. Raises InvalidRequest."""
        origin, host = headers.get("origin"), headers.get("host", "").lower()
        if origin is None:
            return
        if origin.lower().partition("://")[2] != host or (self._is_loopback and not _is_loopback(_name(host))):
            raise InvalidRequest("origin", "pages of other hosts are refused by a service without keys")

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Checks a GET request also by `host`: pages of the same host send no `origin`. Raises InvalidRequest."""
        self.check(headers)
        if self._is_loopback and not _is_loopback(_name(headers.get("host", "").lower())):
            raise InvalidRequest("host", "must be this machine's own for a service without keys")


def _name(host: str) -> str:
    """The host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name == "localhost"
