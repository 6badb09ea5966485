"""Decides which web pages may use the service: send requests to one without keys, and read its replies. Pure.

A page of any host can make the browser send requests to the user's own machine. Browsers name the page's host in
`origin`. But an attacker's host name may resolve to this machine (DNS rebinding); then page and request have the same
host. So a service on a loopback address accepts only pages whose host is a loopback name.
"""

import ipaddress
from collections.abc import Mapping
from typing import Final

from corolla.chassis.errors import InvalidRequest

ALL_ORIGINS: Final = "*"

_SEEN_HEADERS: Final = "x-request-id, retry-after, x-corolla-ignored"
_PREFLIGHT_SECONDS: Final = "600"
_USUAL_HEADERS: Final = "authorization, content-type, x-request-id"


class AllowedOrigins:
    """The origins whose pages may read replies, by the protocol that browsers call CORS.

    Args:
        origins: the origins, such as `https://chat.example.org`; or `*`: all.
    """

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

    @classmethod
    def parse(cls, text: str) -> "AllowedOrigins":
        """Reads a list with commas. Raises ValueError if an entry does not look like an origin."""
        given = [each.strip().rstrip("/").lower() for each in text.split(",") if each.strip()]
        for each in given:
            scheme, _, rest = each.partition("://")
            if each != ALL_ORIGINS and (not scheme.isalpha() or not rest or "/" in rest or "*" in rest):
                raise ValueError(f"{each!r} is not an origin such as https://chat.example.org")
        return cls(frozenset(given))

    def allow(self, origin: str) -> bool:
        """Whether pages of the origin may send requests, and read the replies."""
        return ALL_ORIGINS in self._origins or origin.lower() in self._origins

    def headers(self, request: Mapping[str, str]) -> dict[str, str]:
        """Headers of a reply that tell a browser to let the request's page read it."""
        origin = request.get("origin")
        if origin is None or not self._origins:
            return {}
        vary = {"vary": "origin"}
        if not self.allow(origin):
            return vary
        return {**vary, "access-control-allow-origin": origin, "access-control-expose-headers": _SEEN_HEADERS}

    def preflight_headers(self, request: Mapping[str, str], methods: str) -> dict[str, str]:
        """Headers that tell a browser that a page may send requests with `methods`."""
        headers = {
            "access-control-allow-methods": methods,
            "access-control-allow-headers": request.get("access-control-request-headers", _USUAL_HEADERS),
            "access-control-max-age": _PREFLIGHT_SECONDS,
        }
        if request.get("access-control-request-private-network") == "true":
            headers["access-control-allow-private-network"] = "true"
        return headers


NO_ORIGINS: Final = AllowedOrigins(frozenset())


class OwnPages:
    """Accepts requests that come from no page, from pages of the service's own host, or of allowed origins.

    Args:
        host: the address that the service listens on; empty: all.
    """

    def __init__(self, host: str, origins: AllowedOrigins = NO_ORIGINS) -> None:
        self._is_loopback = _is_loopback(host)
        self._origins = origins

    def check(self, headers: Mapping[str, str]) -> None:
        """Checks a request's headers. Raises InvalidRequest."""
        origin = headers.get("origin")
        if origin is not None and not self._origins.allow(origin):
            self._check_own(origin, headers.get("host", "").lower())

    def _check_own(self, origin: str, host: str) -> None:
        if origin.lower().partition("://")[2] != host or (self._is_loopback and not _is_loopback(_name(host))):
            raise InvalidRequest("origin", "pages of other hosts are refused by a service without keys")

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Checks a GET request also by `host`: pages of the same host send no `origin`. Raises InvalidRequest."""
        origin, host = headers.get("origin"), headers.get("host", "").lower()
        if origin is not None:
            self._check_own(origin, host)
        if self._is_loopback and not _is_loopback(_name(host)):
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
